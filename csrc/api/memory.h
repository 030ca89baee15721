// The ranges that a stage accesses are compared with its tensors before it runs: every call throws
// std::invalid_argument, ValueError in Python, for a tensor of a wrong dtype or one that is too
// short. Tables in device memory are not read here; their rows were checked when they were built.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "descriptor.h"
#include "moments.h"

namespace zerocast::api {

// A tensor without gaps, as `memory` of zerocast/backends/extension.py passes it. None is {0, "", 0}.
struct Memory {
  uintptr_t address = 0;
  std::string dtype;
  int64_t bytes = 0;
};

// Tensors of one dtype.
struct Memories {
  std::vector<uintptr_t> addresses;
  std::string dtype;
  std::vector<int64_t> bytes;

  size_t size() const { return addresses.size(); }
  Memory operator[](size_t i) const { return {addresses[i], dtype, bytes[i]}; }
  Memory at(size_t i) const { return {addresses.at(i), dtype, bytes.at(i)}; }
};

// Throws unless `memory` is of this dtype and has bytes [first, last). The dtype "bytes" is that of
// codes and of byte scales, "floats" any that `dtype_of` knows.
void check_reach(const char* name, const Memory& memory, const char* dtype, int64_t first, int64_t last);
inline void check_reach(const char* name, const Memory& memory, const char* dtype, int64_t bytes) {
  check_reach(name, memory, dtype, 0, bytes);
}

// A tensor of floats, and its elements.
Array array_of(const char* name, const Memory& memory);
std::vector<Array> arrays_of(const char* name, const Memories& memories);
int64_t elements_of(const char* name, const Memory& memory);

// The number of rows of a tensor that is a table of `columns` columns of 4 or 8 bytes.
int64_t rows_of(const char* name, const Memory& memory, const char* dtype, int64_t columns);

// Checks one direction of one weight, and the tensor that it is decoded into.
void check_dequantize(const Format& format, const Memory& data, const Memory& scale_inv, const Memory& amax, int64_t rows,
                      int64_t columns, bool columnwise, const Memory& out);
void check_upcast(const Format& format, const Memory& data, const Memory& scale_inv, const Memory& amax, int64_t rows,
                  int64_t columns, bool transposed, const Memory& codes, const Memory& group_scale_inv);

// The weights of one call of upcast, in the type of the CPU or of the GPU. Only exact scales have amaxes.
template <class Upcast>
std::vector<Upcast> check_upcasts(const Format& format, const Memories& data, const Memories& scale_inv,
                                  const Memories& amaxes, const std::vector<std::pair<int64_t, int64_t>>& shapes,
                                  bool transposed, const Memories& codes, const Memories& group_scale_inv) {
  std::vector<Upcast> weights;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto [rows, columns] = shapes[i];
    const Memory amax = format.exact_scales ? amaxes.at(i) : Memory{};
    check_upcast(format, data.at(i), scale_inv.at(i), amax, rows, columns, transposed, codes.at(i), group_scale_inv.at(i));
    weights.push_back({data.addresses[i], scale_inv.addresses[i], amax.address, rows, columns, transposed,
                       codes.addresses[i], group_scale_inv.addresses[i]});
  }
  return weights;
}

// Returns the number of elements of a tensor of `parts` equal parts.
int64_t check_parts(const char* name, const Memory& memory, int64_t parts);

// Returns the number of elements: of `grad`, which is sent as `parts` messages; of `out`, to which
// `parts` messages are added. These are FP8 messages, or equal parts of a tensor of floats.
int64_t check_quantize_gradient(const Memory& grad, int64_t parts, const Memory& messages);
int64_t check_add_gradients(const Memory& messages, int64_t parts, const Memory& out);

// Whether a stage reads which elements of a weight are owned.
enum class Spans { kUnread, kRead };

// The largest values of cut groups.
CutLargest cut_largest_of(const Memory& cut_largest);

// The tensors of one base of adam_8bit: elements of the shortest flat one, and scales.
struct Adam8bitSizes {
  int64_t numel, scales;
};

// Throws unless the pieces in host memory are inside of the tensors of their bases, have the elements
// of the rows of a table, and each row of scalars has the number of its step.
void check_moment_pieces(const Memory& pieces, const Memory& scalars, const Memory& steps,
                         const std::vector<Adam8bitSizes>& bases, int64_t cuts, const Table& table);

// The rows of a table in host memory; spans that are read are inside of their weights.
class Rows {
 public:
  Rows(const Format& format, const Memory& table, Spans spans);
  const Table& table() const { return table_; }

  // The owned elements of lists that are indexed by MASTER_BASE; of `dtype`.
  void check_masters(const char* name, const Memories& masters, const char* dtype) const;
  // Amaxes and flags, of the rows that own something or of all.
  void check_packed(const Memory& packed, bool of_all) const;
  // The codes of the owned elements.
  void check_codes(Dtype nominal, const Memories& row_data, const Memories* column_data) const;
  // All codes, and all scales.
  void check_whole_codes(const Memories& row_data, const Memories& column_data) const;
  void check_scales(const Memories& row_scales, const Memories& column_scales, bool needs_columnwise) const;
  // Checks `count` floats for each row; with `of_all` false, for each row with owned elements.
  void check_floats(const char* name, const Memories& bases, column::Column base, column::Column offset, int64_t count,
                    bool of_all) const;
  // A row of `scalars` for each row that owns something.
  void check_groups(const Memory& groups, const Memory& scalars) const;

 private:
  struct Place {
    const char* name;
    const Memories& bases;
    column::Column base, offset;
    int64_t unit;  // bytes that the offset counts
    const char* dtype;
  };
  static void check_inside(const Weight& weight, const Place& place, int64_t first, int64_t last);

  const Format& format_;
  Table table_;
};

}  // namespace zerocast::api

namespace pybind11::detail {

template <>
struct type_caster<zerocast::api::Memory> {
  PYBIND11_TYPE_CASTER(zerocast::api::Memory, const_name("tuple[int, str, int]"));
  bool load(handle source, bool convert) {
    using Passed = std::tuple<uintptr_t, std::string, int64_t>;
    make_caster<Passed> passed;
    if (!passed.load(source, convert)) return false;
    std::tie(value.address, value.dtype, value.bytes) = cast_op<Passed>(std::move(passed));
    return true;
  }
};

template <>
struct type_caster<zerocast::api::Memories> {
  PYBIND11_TYPE_CASTER(zerocast::api::Memories, const_name("tuple[list[int], str, list[int]]"));
  bool load(handle source, bool convert) {
    using Passed = std::tuple<std::vector<uintptr_t>, std::string, std::vector<int64_t>>;
    make_caster<Passed> passed;
    if (!passed.load(source, convert)) return false;
    std::tie(value.addresses, value.dtype, value.bytes) = cast_op<Passed>(std::move(passed));
    return value.addresses.size() == value.bytes.size();
  }
};

}  // namespace pybind11::detail
