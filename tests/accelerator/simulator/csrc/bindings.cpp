// The functions that Python calls.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "attention.h"
#include "clocks.h"
#include "device.h"
#include "generator.h"
#include "hooks.h"
#include "kernels.h"
#include "memory.h"
#include "queues.h"
#include "streams.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  sim::memory::register_allocators();
  sim::streams::register_guard();
  sim::hooks::register_hooks();
  sim::attention::register_choice();
  // Functions that take the clocks' lock must not hold the GIL: kernels take them in the other order.
  using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;
  module.def("take_over", &sim::kernels::take_over);
  module.def("races", &sim::clocks::races, NoGil());
  module.def("host_syncs", &sim::clocks::host_syncs, NoGil());
  module.def("host_knows_all", &sim::clocks::host_knows_all, NoGil());
  module.def("reset", &sim::clocks::reset, NoGil());
  module.def("set_memory_limit", &sim::memory::set_limit, NoGil());
  module.def("set_asynchronous", &sim::queues::set_asynchronous, NoGil());
  module.def("default_generator", &sim::generator::default_of);
  module.attr("device_count") = sim::kDevices;
}
