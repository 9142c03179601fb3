// Generators of a device. Each holds a generator of the CPU, so that the same seed gives the same numbers there.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/ivalue.h>

#include <mutex>

namespace sim::generator {

const at::Generator& default_of(int device);
at::Generator make(int device);

bool is_generator(const c10::Type& type);
// The CPU generator inside `argument`, which may be None for the default generator of `device`.
c10::IValue host_generator(const c10::IValue& argument, int device);

// While it lives, kernels that take no generator draw from that of `device`: the CPU's default one has its state.
class LentToHost {
 public:
  explicit LentToHost(int device);
  ~LentToHost();
  LentToHost(const LentToHost&) = delete;
  LentToHost& operator=(const LentToHost&) = delete;

 private:
  std::unique_lock<std::mutex> lock_;
  at::Generator lender_;
  c10::intrusive_ptr<c10::TensorImpl> before_;
};

}  // namespace sim::generator
