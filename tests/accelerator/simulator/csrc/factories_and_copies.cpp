// Operators that the CPU has no kernel for: tensors on a device, and copies between devices.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include "aliases.h"
#include "memory.h"
#include "queues.h"
#include "streams.h"

namespace sim {
namespace {

int index_of(std::optional<c10::Device> device) {
  return device.has_value() && device->has_index() ? device->index() : current_device;
}

// The allocator allocates on the current device.
class OnDevice {
 public:
  explicit OnDevice(int device) : before_(std::exchange(current_device, device)) {}
  ~OnDevice() {
    current_device = before_;
  }

 private:
  int before_;
};

at::Tensor empty(
    c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
    std::optional<c10::Device> device, std::optional<bool> /*pinned*/, std::optional<at::MemoryFormat> format) {
  OnDevice on(index_of(device));
  return at::detail::empty_generic(
      sizes, c10::GetAllocator(kDeviceType), c10::DispatchKeySet(kDispatchKey), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/, std::optional<c10::Device> device, std::optional<bool> /*pinned*/) {
  OnDevice on(index_of(device));
  return at::detail::empty_strided_generic(
      sizes, strides, c10::GetAllocator(kDeviceType), c10::DispatchKeySet(kDispatchKey), c10::dtype_or_default(dtype));
}

void copy_now_or_later(int stream, const at::Tensor& destination, const at::Tensor& source) {
  auto copy = [destination, source] {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    destination.copy_(source);
  };
  if (queues::asynchronous()) {
    queues::push(stream, std::move(copy));
  } else {
    copy();
  }
}

// Stream order as in torch's CUDA copies: between two devices the copy runs on the current stream of the source, and
// the current stream of the destination waits for it.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0) {
    return self;
  }
  auto values = source.expand_as(self);
  bool to_device = on_device(self);
  bool from_device = on_device(source);
  int stream = streams::current((from_device ? source : self).device().index());
  int receiver = to_device ? streams::current(self.device().index()) : stream;
  if (receiver != stream) {
    streams::wait_stream(stream, receiver);
  }
  Kernel kernel(stream, "aten::copy_");
  if (from_device) {
    kernel.read(memory::block_of(source)->history, memory::bytes_of(source));
  }
  if (to_device) {
    kernel.write(memory::block_of(self)->history, memory::bytes_of(self));
  }
  const auto& host = from_device ? self : values;
  bool pinned = (from_device && to_device) || memory::is_pinned(host.storage().data());
  if (!from_device && !pinned) {
    // The driver has read pageable memory when the call returns.
    values = queues::asynchronous() ? values.clone() : values;
  }
  Aliases aliases;
  copy_now_or_later(stream, aliases.of(self), aliases.of(values));
  if (receiver != stream) {
    streams::wait_stream(receiver, stream);
  }
  bool host_waits = from_device != to_device && (!non_blocking || (from_device && !pinned));
  if (host_waits) {
    streams::synchronize(stream, from_device ? "copy to the host" : "copy from the host");
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  auto self = destination;
  return copy_(self, source, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& destination) {
  auto self = destination;
  self.resize_(source.sizes());
  return copy_(self, source, /*non_blocking=*/false);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  streams::record_data(self.storage().data_ptr(), stream);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(sizes, strides);
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

TORCH_LIBRARY_IMPL(aten, SIM_KEY, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("record_stream", &record_stream);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
}

}  // namespace
}  // namespace sim
