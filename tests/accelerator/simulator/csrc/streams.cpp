#include "streams.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <mutex>

#include "clocks.h"
#include "memory.h"
#include "queues.h"

namespace sim::streams {
namespace {

using Time = std::chrono::steady_clock::time_point;

// The default stream of each device comes first, then its pool.
thread_local std::array<int, kDevices> current_streams = [] {
  std::array<int, kDevices> streams{};
  for (int device = 0; device < kDevices; ++device) {
    streams[device] = device;
  }
  return streams;
}();

c10::Stream stream_at(int index) {
  // torch expects the default stream to have the id 0.
  return c10::Stream(c10::Stream::UNSAFE, device_at(device_of(index)), index < kDevices ? 0 : index);
}

struct Event {
  bool timing = false;
  Clock clock;
  queues::Done done;
  std::shared_ptr<Time> time;
};

Event* as_event(void* event) {
  return static_cast<Event*>(event);
}

class SimGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return kDeviceType;
  }
  c10::Device getDevice() const override {
    return device_at(current_device);
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "invalid device ordinal");
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  c10::DeviceCapability getDeviceCapability(c10::Device /*device*/) const override {
    return {};
  }

  c10::Stream getStream(c10::Device device) const override {
    return stream_at(current(device.index() < 0 ? current_device : device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_at(device.index());
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    static std::array<std::atomic<int>, kDevices> next{};
    int index = device.index() < 0 ? current_device : device.index();
    return stream_at(kDevices + index * kPoolStreams + next[index]++ % kPoolStreams);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto& current_stream = current_streams[stream.device_index()];
    auto before = stream_at(current_stream);
    current_stream = index_of(stream);
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return queues::mark(index_of(stream)).wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    streams::synchronize(index_of(stream), "stream.synchronize");
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    clocks::count_host_sync("device.synchronize");
    for (int stream = 0; stream < kStreams; ++stream) {
      if (device_of(stream) == device) {
        clocks::host_waits(clocks::of_stream(stream));
        queues::wait_in_host(queues::mark(stream));
      }
    }
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/, c10::EventFlag flag)
      const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    auto* recorded = as_event(*event);
    auto index = index_of(stream);
    recorded->timing = flag == c10::EventFlag::BACKEND_DEFAULT;
    recorded->clock = clocks::of_stream(index);
    auto time = std::make_shared<Time>(std::chrono::steady_clock::now());
    if (queues::asynchronous()) {
      queues::push(index, [time] { *time = std::chrono::steady_clock::now(); });
    }
    recorded->time = std::move(time);
    recorded->done = queues::mark(index);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      clocks::wait(index_of(stream), as_event(event)->clock);
      queues::wait_in_stream(index_of(stream), as_event(event)->done);
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || as_event(event)->done.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      clocks::count_host_sync("event.synchronize");
      clocks::host_waits(as_event(event)->clock);
      queues::wait_in_host(as_event(event)->done);
    }
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete as_event(event);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex /*device*/) const override {
    for (auto* event : {first, second}) {
      TORCH_CHECK(event != nullptr && as_event(event)->timing, "both events must be recorded with timing enabled");
      TORCH_CHECK(queryEvent(event), "both events must be completed before calculating elapsed time");
    }
    return std::chrono::duration<double, std::milli>(*as_event(second)->time - *as_event(first)->time).count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_data(data, stream);
  }
};

}  // namespace

int current(int device) {
  return current_streams[device];
}

int index_of(const c10::Stream& stream) {
  return stream.id() == 0 ? stream.device_index() : static_cast<int>(stream.id());
}

int device_of(int stream) {
  return stream < kDevices ? stream : (stream - kDevices) / kPoolStreams;
}

void wait_stream(int stream, int other) {
  clocks::wait(stream, clocks::of_stream(other));
  if (queues::asynchronous()) {
    queues::wait_in_stream(stream, queues::mark(other));
  }
}

void synchronize(int stream, const std::string& what) {
  clocks::count_host_sync(what);
  clocks::host_waits(clocks::of_stream(stream));
  queues::wait_in_host(queues::mark(stream));
}

void record_data(const c10::DataPtr& data, const c10::Stream& stream) {
  static std::mutex mutex;
  if (auto block = memory::block_of(data)) {
    std::lock_guard lock(mutex);
    block->recorded.push_back(index_of(stream));
  }
}

void register_guard() {
  static c10::impl::DeviceGuardImplRegistrar registrar(kDeviceType, new SimGuard);
}

}  // namespace sim::streams
