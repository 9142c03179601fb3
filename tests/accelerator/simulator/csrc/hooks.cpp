// What torch asks of an accelerator of its own: whether it is there, its generators and its pinned memory.
#include "hooks.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <utility>

#include "generator.h"
#include "memory.h"

namespace sim::hooks {
namespace {

#ifdef SIM_CUDA
using Interface = at::CUDAHooksInterface;
#else
using Interface = at::PrivateUse1HooksInterface;
#endif

class SimHooks final : public Interface {
 public:
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    sim::current_device = device;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(sim::current_device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(std::exchange(sim::current_device, device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return generator::default_of(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return generator::make(device < 0 ? sim::current_device : device);
  }
  c10::Device getDeviceFromPtr(void* /*data*/) const override {
    return device_at(sim::current_device);
  }
  bool isPinnedPtr(const void* data) const override {
    return memory::is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return memory::pinned_allocator();
  }
#ifdef SIM_CUDA
  bool hasCUDA() const override {
    return true;
  }
  int getNumGPUs() const override {
    return kDevices;
  }
#endif
};

}  // namespace

void register_hooks() {
  static SimHooks hooks;
#ifdef SIM_CUDA
  // A CPU build of torch has already made its hooks, which say that there is no CUDA. They have no members: with our
  // table of virtual functions they are ours. The build is pinned to the torch version for which this was tested.
  auto& built_in = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(&built_in) = *reinterpret_cast<void**>(&hooks);
#else
  at::RegisterPrivateUse1HooksInterface(&hooks);
#endif
}

}  // namespace sim::hooks
