#include "memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "queues.h"
#include "streams.h"

namespace sim::memory {
namespace {

constexpr int kPoison = 0xFF;  // not a number in every floating point type
constexpr size_t kDefaultLimit = size_t{16} << 30;

struct Usage {
  size_t current = 0;
  size_t peak = 0;
};

std::mutex mutex;
std::array<Usage, kDevices> usage;
size_t limit = kDefaultLimit;

std::string mebibytes(size_t nbytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f MiB", static_cast<double>(nbytes) / (1 << 20));
  return text;
}

// A limit that was set later may be below what is in use.
size_t free_of(const Usage& used) {
  return limit - std::min(limit, used.current);
}

void take(int device, size_t nbytes) {
  std::lock_guard lock(mutex);
  auto& used = usage[device];
  TORCH_CHECK_WITH(
      OutOfMemoryError, used.current + nbytes <= limit, "CUDA out of memory. Tried to allocate ", mebibytes(nbytes),
      ". GPU ", device, " has a total capacity of ", mebibytes(limit), " of which ", mebibytes(free_of(used)),
      " is free.");
  used.current += nbytes;
  used.peak = std::max(used.peak, used.current);
}

void give_back(int device, size_t nbytes) {
  std::lock_guard lock(mutex);
  usage[device].current -= nbytes;
}

void poison(const std::shared_ptr<Block>& block) {
  std::memset(block->memory.get(), kPoison, block->nbytes);
}

// The last of these streams to get here poisons the memory.
void poison_when_unused(const std::shared_ptr<Block>& block) {
  auto streams = block->recorded;
  streams.push_back(block->owner);
  auto remaining = std::make_shared<std::atomic<size_t>>(streams.size());
  for (int stream : streams) {
    queues::push(stream, [block, remaining] {
      if (--*remaining == 0) {
        poison(block);
      }
    });
  }
}

void release(void* context) {
  auto* block = static_cast<std::shared_ptr<Block>*>(context);
  clocks::check_free((*block)->history, (*block)->owner, (*block)->recorded);
  give_back((*block)->device, (*block)->nbytes);
  if (queues::asynchronous()) {
    poison_when_unused(*block);
  }
  delete block;
}

c10::DataPtr wrap(int device, c10::DataPtr host, size_t nbytes) {
  take(device, nbytes);
  auto block = std::make_shared<Block>();
  block->memory = std::move(host);
  block->nbytes = nbytes;
  block->device = device;
  block->owner = streams::current(device);
  auto* data = block->memory.get();
  return {data, new std::shared_ptr<Block>(std::move(block)), &release, device_at(device)};
}

class SimAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    return memory::allocate(current_device, nbytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* destination, const void* source, size_t nbytes) const override {
    default_copy_data(destination, source, nbytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t /*pool*/) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    streams::record_data(data, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* array : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes, &stats.requested_bytes}) {
      auto& total = (*array)[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
      total.current = static_cast<int64_t>(usage[device].current);
      total.peak = static_cast<int64_t>(usage[device].peak);
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex);
    usage[device].peak = usage[device].current;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex);
    return {free_of(usage[device]), limit};
  }
};

std::map<const char*, size_t> pinned_ranges;

void release_pinned(void* data) {
  {
    std::lock_guard lock(mutex);
    pinned_ranges.erase(static_cast<const char*>(data));
  }
  c10::free_cpu(data);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    auto* data = c10::alloc_cpu(std::max<size_t>(nbytes, 1));
    if (queues::asynchronous()) {
      std::memset(data, kPoison, nbytes);
    }
    std::lock_guard lock(mutex);
    pinned_ranges[static_cast<const char*>(data)] = std::max<size_t>(nbytes, 1);
    return {data, data, &release_pinned, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release_pinned;
  }
  void copy_data(void* destination, const void* source, size_t nbytes) const override {
    default_copy_data(destination, source, nbytes);
  }
};

}  // namespace

c10::DataPtr allocate(int device, size_t nbytes) {
  auto data = wrap(device, c10::GetCPUAllocator()->allocate(nbytes), nbytes);
  if (queues::asynchronous()) {
    poison(block_of(data));
  }
  return data;
}

c10::DataPtr adopt(int device, c10::Storage storage) {
  auto nbytes = storage.nbytes();
  auto* data = storage.mutable_data();
  auto drop = [](void* context) { delete static_cast<c10::Storage*>(context); };
  return wrap(device, {data, new c10::Storage(std::move(storage)), drop, c10::DeviceType::CPU}, nbytes);
}

std::shared_ptr<Block> block_of(const c10::DataPtr& data) {
  return data.get_deleter() == &release ? *static_cast<std::shared_ptr<Block>*>(data.get_context()) : nullptr;
}

std::shared_ptr<Block> block_of(const at::TensorBase& tensor) {
  return tensor.has_storage() ? block_of(tensor.storage().data_ptr()) : nullptr;
}

Bytes bytes_of(const at::TensorBase& tensor) {
  int64_t last = tensor.storage_offset();
  for (int64_t dimension = 0; dimension < tensor.dim(); ++dimension) {
    last += (tensor.size(dimension) - 1) * tensor.stride(dimension);
  }
  auto width = static_cast<int64_t>(tensor.element_size());
  return {tensor.storage_offset() * width, (last + 1) * width};
}

void set_limit(size_t nbytes) {
  std::lock_guard lock(mutex);
  limit = nbytes == 0 ? kDefaultLimit : nbytes;
}

c10::Allocator* pinned_allocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

bool is_pinned(const void* data) {
  std::lock_guard lock(mutex);
  auto* address = static_cast<const char*>(data);
  auto after = pinned_ranges.upper_bound(address);
  if (after == pinned_ranges.begin()) {
    return false;
  }
  auto range = std::prev(after);
  return address < range->first + range->second;
}

void register_allocators() {
  static SimAllocator allocator;
  c10::SetAllocator(kDeviceType, &allocator, /*priority=*/255);
}

}  // namespace sim::memory
