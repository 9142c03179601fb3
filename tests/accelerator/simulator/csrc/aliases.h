// CPU tensors on the memory of device tensors, on which the CPU's kernels run.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "device.h"

namespace sim {

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDeviceType;
}

// Within one call: the same alias for the same tensor, and one storage for the aliases of one storage.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor);
  // The device tensor for what a CPU kernel returned.
  at::Tensor back(const at::Tensor& result, int device) const;
  // A kernel with an `out` argument may have given its alias another size, and other memory.
  void take_resizes(int device) const;

 private:
  c10::Storage storage_of(const at::Tensor& tensor) const;

  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
};

}  // namespace sim
