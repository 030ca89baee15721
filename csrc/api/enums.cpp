#include "api/enums.h"

#include <initializer_list>
#include <stdexcept>
#include <utility>

namespace zerocast::api {
namespace {

template <class Enum>
Enum lookup(const char* kind, const std::string& name, std::initializer_list<std::pair<const char*, Enum>> known) {
  for (const auto& [key, value] : known) {
    if (name == key) return value;
  }
  throw std::invalid_argument(std::string("unknown ") + kind + " '" + name + "'");
}

}  // namespace

Dtype dtype_of(const std::string& name) {
  return lookup<Dtype>("dtype", name,
                       {{"float32", Dtype::kFloat32}, {"bfloat16", Dtype::kBfloat16}, {"float16", Dtype::kFloat16}});
}

Element element_of(const std::string& name) {
  return lookup<Element>("element", name,
                         {{"nominal", Element::kNominal},
                          {"e4m3", Element::kE4M3},
                          {"e5m2", Element::kE5M2},
                          {"e2m1", Element::kE2M1},
                          {"int4", Element::kInt4}});
}

ScaleRule scale_rule_of(const std::string& name) {
  return lookup<ScaleRule>("scale rule", name,
                           {{"NONE", ScaleRule::kNone},
                            {"FP32", ScaleRule::kFP32},
                            {"E8M0", ScaleRule::kE8M0},
                            {"TWO_LEVEL", ScaleRule::kTwoLevel},
                            {"BF16", ScaleRule::kBF16}});
}

Columnwise columnwise_of(const std::string& name) {
  return lookup<Columnwise>("columnwise rule", name,
                            {{"NONE", Columnwise::kNone},
                             {"TRANSPOSE", Columnwise::kTranspose},
                             {"OWN_GRID", Columnwise::kOwnGrid},
                             {"SHARED", Columnwise::kShared}});
}

AmaxPolicy amax_policy_of(const std::string& name) {
  return lookup<AmaxPolicy>(
      "amax policy", name,
      {{"NONE", AmaxPolicy::kNone}, {"CURRENT", AmaxPolicy::kCurrent}, {"DELAYED", AmaxPolicy::kDelayed}});
}

}  // namespace zerocast::api
