#pragma once

namespace sim::attention {

// Makes torch choose a fused kernel where it would on the CPU.
void register_choice();

}  // namespace sim::attention
