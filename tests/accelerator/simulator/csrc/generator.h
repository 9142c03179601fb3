// Generators of a device. Each holds a generator of the CPU, so that the same seed gives the same numbers there.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/ivalue.h>

namespace sim::generator {

const at::Generator& default_of(int device);
at::Generator make(int device);

bool is_generator(const c10::Type& type);
// The CPU generator inside `argument`, which may be None for the default generator of `device`.
c10::IValue host_generator(const c10::IValue& argument, int device);

}  // namespace sim::generator
