#pragma once

namespace sim::hooks {

void register_hooks();

}  // namespace sim::hooks
