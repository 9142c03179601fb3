// Fused attention: torch asks each type of device for its choice, and calls an operator that the CPU does not have. Both
// go to the CPU's own fused kernel. With dropout the CPU has none, and attention is composed of other operators.
#include "attention.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <torch/library.h>

#include "aliases.h"

namespace sim::attention {
namespace {

constexpr int64_t kMath = 0;
constexpr int64_t kEfficientAttention = 2;

int64_t choice(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool causal, std::optional<double> scale, bool grouped) {
  Aliases aliases;
  auto host_mask = mask ? std::make_optional(aliases.of(*mask)) : std::nullopt;
  auto host_choice = at::_fused_sdp_choice(
      aliases.of(query), aliases.of(key), aliases.of(value), host_mask, dropout, causal, scale, grouped);
  return host_choice == kMath ? kMath : kEfficientAttention;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& bias,
    bool /*log_sum_exp*/, double dropout, bool causal, std::optional<double> scale) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto [output, log_sum_exp] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, bias, scale);
  // The seeds of dropout, which there is none of.
  return {output, log_sum_exp, query.new_empty({}, at::kLong), query.new_empty({}, at::kLong)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& bias, const at::Tensor& output, const at::Tensor& log_sum_exp, const at::Tensor& /*seed*/,
    const at::Tensor& /*offset*/, double dropout, std::array<bool, 4> /*wanted*/, bool causal,
    std::optional<double> scale) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto mask = bias.defined() ? std::make_optional(bias) : std::nullopt;
  auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      gradient, query, key, value, output, log_sum_exp, dropout, causal, mask, scale);
  return {of_query, of_key, of_value, at::Tensor()};
}

TORCH_LIBRARY_IMPL(aten, SIM_KEY, library) {
  library.impl("_scaled_dot_product_efficient_attention", &forward);
  library.impl("_scaled_dot_product_efficient_attention_backward", &backward);
}

}  // namespace

void register_choice() {
#ifdef SIM_CUDA
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choice);
#else
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&choice);
#endif
}

}  // namespace sim::attention
