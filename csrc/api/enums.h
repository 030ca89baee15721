// Names of the enumerations as Python spells them; throws std::invalid_argument for any other.
#pragma once

#include <string>

#include "descriptor.h"

namespace zerocast::api {

Dtype dtype_of(const std::string& name);
Element element_of(const std::string& name);
ScaleRule scale_rule_of(const std::string& name);
Columnwise columnwise_of(const std::string& name);
AmaxPolicy amax_policy_of(const std::string& name);

}  // namespace zerocast::api
