// Runs the CPU's kernel of an operator on the memory of simulated tensors.
#pragma once

#include <string>
#include <vector>

namespace sim::kernels {

// Takes over operators that have a CPU kernel and a composite one, which would otherwise win and give other bits.
void take_over(const std::vector<std::string>& operators);

}  // namespace sim::kernels
