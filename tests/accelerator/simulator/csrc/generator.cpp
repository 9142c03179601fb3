#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/jit_type.h>
#include <c10/core/GeneratorImpl.h>

#include <array>

#include "device.h"

namespace sim::generator {
namespace {

class SimGenerator final : public c10::GeneratorImpl {
 public:
  SimGenerator(int device, at::Generator host)
      : GeneratorImpl(device_at(device), c10::DispatchKeySet(kDispatchKey)), host_(std::move(host)) {}

  const at::Generator& host() const {
    return host_;
  }
  void set_current_seed(uint64_t seed) override {
    host_.set_current_seed(seed);
  }
  // The CPU's engine knows no offset: another offset is another seed.
  void set_offset(uint64_t offset) override {
    offset_ = offset;
    host_.set_current_seed(host_.current_seed() ^ (offset * 0x9E3779B97F4A7C15ULL));
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  uint64_t current_seed() const override {
    return host_.current_seed();
  }
  uint64_t seed() override {
    return host_.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    host_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  SimGenerator* clone_impl() const override {
    return new SimGenerator(device().index(), host_.clone());
  }

  at::Generator host_;
  uint64_t offset_ = 0;
};

}  // namespace

at::Generator make(int device) {
  return at::make_generator<SimGenerator>(device, at::detail::createCPUGenerator());
}

const at::Generator& default_of(int device) {
  static std::array<at::Generator, kDevices> generators = [] {
    std::array<at::Generator, kDevices> made;
    for (int index = 0; index < kDevices; ++index) {
      made[index] = make(index);
    }
    return made;
  }();
  return generators[device < 0 ? current_device : device];
}

bool is_generator(const c10::Type& type) {
  if (const auto* optional = type.castRaw<c10::OptionalType>()) {
    return is_generator(*optional->getElementType());
  }
  return type.kind() == c10::TypeKind::GeneratorType;
}

c10::IValue host_generator(const c10::IValue& argument, int device) {
  const auto& given = argument.isNone() ? default_of(device) : argument.toGenerator();
  TORCH_CHECK(given.device().type() == kDeviceType, "Expected a '", kDeviceType, "' device type for generator");
  return given.get<SimGenerator>()->host();
}

namespace {

std::mutex lending;

c10::GeneratorImpl& default_of_host() {
  return *at::detail::getDefaultCPUGenerator().unsafeGetGeneratorImpl();
}

}  // namespace

LentToHost::LentToHost(int device)
    : lock_(lending), lender_(default_of(device).get<SimGenerator>()->host()), before_(default_of_host().get_state()) {
  default_of_host().set_state(*lender_.unsafeGetGeneratorImpl()->get_state());
}

LentToHost::~LentToHost() {
  lender_.unsafeGetGeneratorImpl()->set_state(*default_of_host().get_state());
  default_of_host().set_state(*before_);
}

}  // namespace sim::generator
