#include "aliases.h"

#include <c10/core/CPUAllocator.h>

#include "memory.h"

namespace sim {
namespace {

at::Tensor with_shape_of(const at::Tensor& tensor, at::Tensor result) {
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  result._set_conj(tensor.is_conj());
  result._set_neg(tensor.is_neg());
  return result;
}

}  // namespace

at::Tensor Aliases::of(const at::Tensor& tensor) {
  if (!on_device(tensor)) {
    return tensor;
  }
  for (const auto& [original, alias] : pairs_) {
    if (original.is_same(tensor)) {
      return alias;
    }
  }
  auto alias = with_shape_of(
      tensor, at::detail::make_tensor<c10::TensorImpl>(
                  storage_of(tensor), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype()));
  pairs_.emplace_back(tensor, alias);
  return alias;
}

at::Tensor Aliases::back(const at::Tensor& result, int device) const {
  if (!result.defined() || result.device().type() != c10::DeviceType::CPU) {
    return result;
  }
  for (const auto& [original, alias] : pairs_) {
    if (alias.is_same(result)) {
      return original;
    }
  }
  for (const auto& [original, alias] : pairs_) {
    if (alias.storage().is_alias_of(result.storage())) {
      // Like the tensor it is a view of, also where inference mode would make another kind of tensor.
      auto view = c10::Storage(original.storage());
      return with_shape_of(
          result, at::detail::make_tensor<c10::TensorImpl>(
                      c10::TensorImpl::VIEW, std::move(view), original.key_set(), result.dtype()));
    }
  }
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), result.storage().nbytes(), memory::adopt(device, result.storage()),
      c10::GetAllocator(kDeviceType), /*resizable=*/true);
  return with_shape_of(
      result, at::detail::make_tensor<c10::TensorImpl>(
                  std::move(storage), c10::DispatchKeySet(kDispatchKey), result.dtype()));
}

void Aliases::take_resizes(int device) const {
  for (const auto& [original, alias] : pairs_) {
    auto* storage = original.storage().unsafeGetStorageImpl();
    if (alias.storage().data() != storage->data()) {
      auto nbytes = alias.storage().nbytes();
      storage->set_data_ptr_noswap(memory::adopt(device, alias.storage()));
      storage->set_nbytes(nbytes);
    }
    if (alias.sizes() != original.sizes() || alias.strides() != original.strides()) {
      original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
    }
  }
}

c10::Storage Aliases::storage_of(const at::Tensor& tensor) const {
  for (const auto& [original, alias] : pairs_) {
    if (original.storage().is_alias_of(tensor.storage())) {
      return alias.storage();
    }
  }
  // The alias keeps the memory, not the tensor: dropping the tensor must have its usual effects.
  auto* kept = new std::shared_ptr<Block>(memory::block_of(tensor));
  auto drop = [](void* context) { delete static_cast<std::shared_ptr<Block>*>(context); };
  auto* data = const_cast<void*>(tensor.storage().data());
  return {
      c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), c10::DataPtr(data, kept, drop, c10::DeviceType::CPU),
      c10::GetCPUAllocator(), /*resizable=*/true};
}

}  // namespace sim
