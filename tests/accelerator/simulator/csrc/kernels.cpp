#include "kernels.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <set>

#include "aliases.h"
#include "generator.h"
#include "memory.h"
#include "queues.h"
#include "streams.h"

namespace sim::kernels {
namespace {

using torch::jit::Stack;

// The shape of what they return depends on values, so the host waits for the device.
const std::set<std::string> kHostReads = {
    "aten::_local_scalar_dense", "aten::nonzero",    "aten::masked_select",           "aten::equal",
    "aten::_unique2",            "aten::unique_dim", "aten::unique_consecutive",      "aten::repeat_interleave",
    "aten::bincount",            "aten::histc",      "aten::_assert_async",
};

// What the schema says about the effects of an operator.
struct Effects {
  std::vector<bool> writes;
  bool is_view = false;
  bool reads_on_host = false;
  bool takes_generator = false;
  bool draws = false;

  explicit Effects(const c10::OperatorHandle& op) : draws(op.hasTag(at::Tag::nondeterministic_seeded)) {
    const auto& schema = op.schema();
    reads_on_host = kHostReads.count(schema.name()) > 0;
    bool any_write = false;
    for (const auto& argument : schema.arguments()) {
      takes_generator = takes_generator || generator::is_generator(*argument.type());
      writes.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
      any_write = any_write || writes.back();
    }
    for (const auto& result : schema.returns()) {
      is_view = is_view || (result.alias_info() != nullptr && !any_write);
    }
  }
};

template <class Visit>
void visit_tensors(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) {
      visit(tensor);
    }
  } else if (value.isList()) {
    for (const c10::IValue& member : value.toListRef()) {
      visit_tensors(member, visit);
    }
  }
}

template <class Map>
c10::IValue map_tensors(const c10::IValue& value, Map map) {
  if (value.isTensor()) {
    return map(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorList()) {
      mapped.push_back(map(tensor));
    }
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      mapped.push_back(tensor.has_value() ? std::make_optional(map(*tensor)) : std::nullopt);
    }
    return mapped;
  }
  return value;
}

// The number of intra-op threads decides the order of sums. It belongs to the thread that launches a kernel, and every
// thread of autograd has one of its own; a device has no such number.
class OneThread {
 public:
  OneThread() : before_(at::get_num_threads()) {
    if (before_ != 1) {
      at::set_num_threads(1);
    }
  }
  ~OneThread() {
    if (before_ != 1) {
      at::set_num_threads(before_);
    }
  }

 private:
  int before_;
};

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  OneThread one_thread;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

// One call of an operator with tensors of one device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), stack_(stack), effects_(op), arguments_(torch::jit::last(*stack, effects_.writes.size()).vec()) {
    for (const auto& argument : arguments_) {
      visit_tensors(argument, [this](const at::Tensor& tensor) { check_device(tensor); });
      if (argument.isDevice() && device_ < 0 && argument.toDevice().type() == kDeviceType) {
        device_ = argument.toDevice().has_index() ? argument.toDevice().index() : current_device;
      }
    }
    TORCH_CHECK(device_ >= 0, op_.schema().name(), " got no tensor of a simulated device");
    stream_ = streams::current(device_);
  }

  void run() {
    if (effects_.is_view) {
      finish(run_with(aliases_, arguments_));
      return;
    }
    if (effects_.reads_on_host || indexes_with_mask()) {
      streams::synchronize(stream_, op_.schema().name());
    }
    Kernel kernel(stream_, op_.schema().name());
    record_accesses(kernel);
    if (queues::asynchronous() && !effects_.reads_on_host && launch(kernel)) {
      return;
    }
    if (queues::asynchronous()) {
      // Its output is only known after it ran. CUDA would not wait here, so this does not count.
      queues::wait_in_host(queues::mark(stream_));
    }
    auto results = run_with(aliases_, arguments_);
    aliases_.take_resizes(device_);
    finish(std::move(results));
    for (const auto& result : torch::jit::last(*stack_, op_.schema().returns().size())) {
      visit_tensors(result, [&](const at::Tensor& tensor) { record_write(kernel, tensor); });
    }
  }

 private:
  void check_device(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return;
    }
    if (!on_device(tensor)) {
      TORCH_CHECK(
          tensor.dim() == 0 || tensor.device().type() != c10::DeviceType::CPU || op_.schema().name() == "aten::index" ||
              op_.schema().name() == "aten::_index_put_impl_",
          "Expected all tensors to be on the same device, but ", op_.schema().name(), " got one on the CPU");
      return;
    }
    TORCH_CHECK(
        device_ < 0 || tensor.device().index() == device_,
        "Expected all tensors to be on the same device, but found at least two devices, ", device_at(device_), " and ",
        tensor.device(), " in ", op_.schema().name());
    device_ = tensor.device().index();
  }

  bool indexes_with_mask() const {
    bool mask = false;
    if (op_.schema().name() == "aten::index" || op_.schema().name() == "aten::_index_put_impl_") {
      visit_tensors(arguments_[1], [&](const at::Tensor& tensor) {
        mask = mask || (tensor.defined() && tensor.scalar_type() == at::kBool);
      });
    }
    return mask;
  }

  void record_write(const Kernel& kernel, const at::Tensor& tensor) {
    auto block = on_device(tensor) ? memory::block_of(tensor) : nullptr;
    if (block && block->history.writes.empty()) {
      kernel.write(block->history, memory::bytes_of(tensor));
    }
  }

  void record_accesses(const Kernel& kernel) {
    for (size_t place = 0; place < arguments_.size(); ++place) {
      visit_tensors(arguments_[place], [&](const at::Tensor& tensor) {
        auto block = on_device(tensor) && tensor.numel() > 0 ? memory::block_of(tensor) : nullptr;
        if (block) {
          auto bytes = memory::bytes_of(tensor);
          effects_.writes[place] ? kernel.write(block->history, bytes) : kernel.read(block->history, bytes);
        }
      });
    }
  }

  Stack run_with(Aliases& aliases, c10::ArrayRef<c10::IValue> arguments) const {
    Stack stack;
    for (size_t place = 0; place < arguments.size(); ++place) {
      const auto& type = op_.schema().arguments()[place].type();
      if (generator::is_generator(*type)) {
        stack.emplace_back(generator::host_generator(arguments[place], device_));
      } else if (arguments[place].isDevice() && arguments[place].toDevice().type() == kDeviceType) {
        stack.emplace_back(c10::Device(c10::DeviceType::CPU));
      } else {
        stack.push_back(map_tensors(arguments[place], [&](const at::Tensor& tensor) { return aliases.of(tensor); }));
      }
    }
    std::optional<generator::LentToHost> lent;
    if (effects_.draws && !effects_.takes_generator) {
      lent.emplace(device_);
    }
    run_on_cpu(op_, &stack);
    return stack;
  }

  void finish(Stack results) {
    torch::jit::drop(*stack_, arguments_.size());
    for (auto& result : results) {
      stack_->push_back(map_tensors(result, [&](const at::Tensor& tensor) { return aliases_.back(tensor, device_); }));
    }
  }

  // Asynchronous mode: returns tensors at once and runs the kernel later; false if that is not possible.
  bool launch(const Kernel& kernel) {
    auto outputs = outputs_without_running();
    if (!outputs) {
      return false;
    }
    Aliases of_outputs;
    std::vector<at::Tensor> destinations;
    for (const auto& output : *outputs) {
      visit_tensors(output, [&](const at::Tensor& tensor) {
        if (on_device(tensor)) {
          record_write(kernel, tensor);
        }
        destinations.push_back(of_outputs.of(tensor));
      });
    }
    Stack inputs(arguments_.begin(), arguments_.end());
    for (auto& input : inputs) {
      input = map_tensors(input, [&](const at::Tensor& tensor) { return aliases_.of(tensor); });
    }
    // In-place results are the arguments themselves.
    queues::push(
        stream_, [op = op_, inputs = std::move(inputs), destinations]() mutable {
          run_on_cpu(op, &inputs);
          size_t place = 0;
          for (const auto& result : inputs) {
            visit_tensors(result, [&](const at::Tensor& tensor) {
              auto& destination = destinations[place++];
              // Some kernels of the CPU leave an output empty that the meta kernel gives a shape.
              if (tensor.defined() && tensor.numel() > 0 && destination.data_ptr() != tensor.data_ptr()) {
                destination.copy_(tensor);
              }
            });
          }
        });
    torch::jit::drop(*stack_, arguments_.size());
    for (auto& output : *outputs) {
      stack_->push_back(std::move(output));
    }
    return true;
  }

  // Fresh tensors with the shapes that the meta kernel gives, or the arguments that the operator writes.
  std::optional<Stack> outputs_without_running() {
    // A generator must be in its next state when the launch returns.
    if (effects_.draws || effects_.takes_generator || !op_.hasKernelForDispatchKey(c10::DispatchKey::Meta)) {
      return std::nullopt;
    }
    std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
    auto to_meta = [&](const at::Tensor& tensor) {
      if (!on_device(tensor)) {
        return tensor;
      }
      auto meta = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::DeviceType::Meta));
      pairs.emplace_back(tensor, meta);
      return meta;
    };
    Stack stack;
    for (const auto& argument : arguments_) {
      if (argument.isDevice()) {
        stack.emplace_back(c10::Device(c10::DeviceType::Meta));
      } else {
        stack.push_back(map_tensors(argument, to_meta));
      }
    }
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    for (const auto& [original, meta] : pairs) {
      if (original.sizes() != meta.sizes()) {
        return std::nullopt;  // an `out` argument is resized
      }
    }
    auto from_meta = [&](const at::Tensor& tensor) {
      if (!tensor.defined()) {
        return tensor;
      }
      for (const auto& [original, meta] : pairs) {
        if (meta.is_same(tensor)) {
          return original;
        }
      }
      return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device_at(device_)));
    };
    for (auto& result : stack) {
      result = map_tensors(result, from_meta);
    }
    return stack;
  }

  const c10::OperatorHandle& op_;
  Stack* stack_;
  Effects effects_;
  std::vector<c10::IValue> arguments_;
  Aliases aliases_;
  int device_ = -1;
  int stream_ = 0;
};

void run_boxed(const c10::OperatorHandle& op, Stack* stack) {
  Call(op, stack).run();
}

TORCH_LIBRARY_IMPL(_, SIM_KEY, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_boxed>());
}

}  // namespace

void take_over(const std::vector<std::string>& operators) {
  static torch::Library library(torch::Library::IMPL, "aten", kDispatchKey, __FILE__, __LINE__);
  for (const auto& name : operators) {
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_boxed>());
  }
}

}  // namespace sim::kernels
