#include "api/memory.h"

#include <algorithm>
#include <stdexcept>

#include "api/enums.h"
#include "gradient_message.h"
#include "scale_buffer.h"

namespace zerocast::api {
namespace {

constexpr int64_t kMost = int64_t{1} << 48;  // most elements and offsets, so that no sum or product overflows

bool is_near(int64_t offset) { return -kMost <= offset && offset <= kMost; }

bool is_of(const std::string& found, const std::string& dtype) {
  if (dtype == "bytes") return found == "uint8" || found.rfind("float8_", 0) == 0;
  if (dtype == "floats") return found == "float32" || found == "bfloat16" || found == "float16";
  return found == dtype;
}

// The number of elements of a weight.
int64_t numel_of(int64_t rows, int64_t columns) {
  int64_t numel;
  if (rows < 1 || columns < 1 || __builtin_mul_overflow(rows, columns, &numel) || numel > kMost) {
    throw std::invalid_argument("a weight has no " + std::to_string(rows) + "x" + std::to_string(columns) + " elements");
  }
  return numel;
}

int64_t code_bytes(const Format& format, int64_t rows, int64_t columns) {
  const int64_t numel = numel_of(rows, columns), per_byte = format.elements_per_byte();
  if (columns % per_byte) throw std::invalid_argument("codes of half a byte need an even number of columns");
  return numel / per_byte;
}

// The bytes up to the end of the last row of a scale buffer that is read: rows that repeat it may be
// missing, and padding.
int64_t read_bytes(const ScaleBuffer& buffer) { return ((buffer.grid.down - 1) * buffer.repeat + 1) * buffer.row_bytes(); }

const char* scale_dtype(const ScaleBuffer& buffer) {
  return buffer.entry == 1 ? "bytes" : buffer.entry == 2 ? "bfloat16" : "float32";
}

void check_messages(const Memory& messages, int64_t parts, int64_t numel) {
  if (parts < 1 || parts > kMost / (numel + 16)) {
    throw std::invalid_argument("there are no messages of " + std::to_string(parts) + " parts");
  }
  check_reach("messages", messages, "bytes", parts * GradientMessage{numel}.bytes());
}

}  // namespace

void check_reach(const char* name, const Memory& memory, const char* dtype, int64_t first, int64_t last) {
  if (first == last) return;
  if (!is_of(memory.dtype, dtype)) {
    throw std::invalid_argument(std::string(name) + " is " + (memory.dtype.empty() ? "None" : memory.dtype) + ", " + dtype +
                                " is needed");
  }
  if (memory.address == 0 || first < 0 || last > memory.bytes) {
    throw std::invalid_argument(std::string(name) + " needs bytes " + std::to_string(first) + " to " + std::to_string(last) +
                                " of a tensor that has " + std::to_string(memory.address == 0 ? 0 : memory.bytes));
  }
}

Array array_of(const char* name, const Memory& memory) {
  if (!is_of(memory.dtype, "floats")) check_reach(name, memory, "floats", 1);
  return {memory.address, dtype_of(memory.dtype)};
}

std::vector<Array> arrays_of(const char* name, const Memories& memories) {
  std::vector<Array> arrays;
  for (size_t i = 0; i < memories.size(); ++i) arrays.push_back(array_of(name, memories[i]));
  return arrays;
}

int64_t elements_of(const char* name, const Memory& memory) {
  check_reach(name, memory, "floats", memory.bytes);
  return memory.bytes / size_of(array_of(name, memory).dtype);
}

int64_t rows_of(const char* name, const Memory& memory, const char* dtype, int64_t columns) {
  check_reach(name, memory, dtype, std::max<int64_t>(memory.bytes, is_of(memory.dtype, dtype) ? 0 : 1));
  const int64_t row = columns * (is_of("int64", dtype) ? 8 : 4);
  if (memory.bytes % row) {
    throw std::invalid_argument(std::string(name) + " is a table of " + std::to_string(columns) + " columns, " +
                                std::to_string(row) + " bytes a row; got " + std::to_string(memory.bytes) + " bytes");
  }
  return memory.bytes / row;
}

void check_dequantize(const Format& format, const Memory& data, const Memory& scale_inv, const Memory& amax, int64_t rows,
                      int64_t columns, bool columnwise, const Memory& out) {
  check_reach("out", out, "floats", numel_of(rows, columns) * size_of(array_of("out", out).dtype));
  if (format.element == Element::kNominal) {
    return check_reach("data", data, "floats", rows * columns * size_of(array_of("data", data).dtype));
  }
  const bool transposed = columnwise && format.columnwise == Columnwise::kTranspose;
  check_reach("data", data, "bytes", transposed ? code_bytes(format, columns, rows) : code_bytes(format, rows, columns));
  const ScaleBuffer buffer =
      columnwise ? columnwise_scale_buffer(format, rows, columns) : rowwise_scale_buffer(format, rows, columns);
  if (format.block) {
    check_reach("scale_inv", scale_inv, scale_dtype(buffer), read_bytes(buffer));
  } else {
    check_reach("scale_inv", scale_inv, "float32", sizeof(float));
  }
  if (format.scale_rule == ScaleRule::kTwoLevel) check_reach("amax", amax, "float32", sizeof(float));
}

void check_upcast(const Format& format, const Memory& data, const Memory& scale_inv, const Memory& amax, int64_t rows,
                  int64_t columns, bool transposed, const Memory& codes, const Memory& group_scale_inv) {
  if (!format.scale_group && !format.exact_scales) {
    throw std::invalid_argument("only formats whose scales come in groups, or are exact, are exact in FP8");
  }
  check_reach("data", data, "bytes", code_bytes(format, rows, columns));
  check_reach("scale_inv", scale_inv, "bytes", read_bytes(rowwise_scale_buffer(format, rows, columns)));
  check_reach("codes", codes, "bytes", rows * columns);
  if (format.exact_scales) {
    check_reach("amax", amax, "float32", sizeof(float));
    return check_reach("group_scale_inv", group_scale_inv, "float32", sizeof(float));
  }
  const GridShape grid = grid_shape(format.scale_group, rows, columns);
  const int64_t down = transposed ? grid.across : grid.down, across = transposed ? grid.down : grid.across;
  check_reach("group_scale_inv", group_scale_inv, "float32", down * round_up(across, 4) * 4);
}

int64_t check_parts(const char* name, const Memory& memory, int64_t parts) {
  const int64_t numel = elements_of(name, memory);
  if (parts < 1 || numel % parts) {
    throw std::invalid_argument(std::string(name) + " of " + std::to_string(numel) + " elements has no " +
                                std::to_string(parts) + " equal parts");
  }
  return numel;
}

int64_t check_quantize_gradient(const Memory& grad, int64_t parts, const Memory& messages) {
  const int64_t numel = check_parts("a gradient", grad, parts);
  check_messages(messages, parts, numel / parts);
  return numel;
}

int64_t check_add_gradients(const Memory& messages, int64_t parts, const Memory& out) {
  const int64_t numel = elements_of("out", out);
  check_reach("out", out, "float32", out.bytes);
  if (!is_of(messages.dtype, "floats")) {
    check_messages(messages, parts, numel);
  } else if (check_parts("a gradient", messages, parts) / parts != numel) {
    throw std::invalid_argument("out has " + std::to_string(numel) + " elements and the gradients of " +
                                std::to_string(parts) + " parts " + std::to_string(elements_of("messages", messages)));
  }
  return numel;
}

CutLargest cut_largest_of(const Memory& cut_largest) {
  return {reinterpret_cast<float*>(cut_largest.address), rows_of("cut_largest", cut_largest, "float32", 2)};
}

void check_moment_pieces(const Memory& pieces, const Memory& scalars, const Memory& steps,
                         const std::vector<Adam8bitSizes>& bases, int64_t cuts, const Table& table) {
  const int64_t count = rows_of("pieces", pieces, "int64", MomentPiece::kWidth);
  if (count != table.size) {
    throw std::invalid_argument(std::to_string(count) + " pieces have " + std::to_string(table.size) + " rows of a table");
  }
  const int64_t groups = rows_of("scalars", scalars, "float32", 8);
  check_reach("steps", steps, "int64", groups * 8);
  const auto* row = reinterpret_cast<const MomentPiece*>(pieces.address);
  for (int64_t i = 0; i < count; ++i, ++row) {
    const std::string piece = "piece " + std::to_string(i);
    const Weight w = table[i];
    if (row->base < 0 || row->base >= static_cast<int64_t>(bases.size()) || row->base != w[column::MASTER_BASE]) {
      throw std::invalid_argument(piece + " is of base " + std::to_string(row->base) + " of " +
                                  std::to_string(bases.size()) + ", its row of the table of " +
                                  std::to_string(w[column::MASTER_BASE]));
    }
    const Adam8bitSizes& base = bases[row->base];
    if (row->offset < 0 || row->numel < 1 || row->offset > base.numel || row->numel > base.numel - row->offset) {
      throw std::invalid_argument(piece + " has " + std::to_string(row->numel) + " elements from " +
                                  std::to_string(row->offset) + " on, the shortest tensor has " +
                                  std::to_string(base.numel));
    }
    if (row->columns < 1 || row->columns > kMost || row->start < 0 || row->start > kMost) {
      throw std::invalid_argument(piece + " begins at element " + std::to_string(row->start) + " of a weight of " +
                                  std::to_string(row->columns) + " columns");
    }
    for (const int64_t scale : {row->scale, row->second_scale}) {
      if (scale < 0 || scale > base.scales || row->groups() > base.scales - scale) {
        throw std::invalid_argument(piece + " needs " + std::to_string(row->groups()) + " scales from " +
                                    std::to_string(scale) + " on, there are " + std::to_string(base.scales));
      }
    }
    if (row->scalars < 0 || row->scalars >= groups || row->cut_first >= cuts || row->cut_last >= cuts) {
      throw std::invalid_argument(piece + " takes row " + std::to_string(row->scalars) + " of " + std::to_string(groups) +
                                  " rows of scalars, and cut groups " + std::to_string(row->cut_first) + " and " +
                                  std::to_string(row->cut_last) + " of " + std::to_string(cuts));
    }
    if (row->offset != w[column::MASTER_OFFSET] || row->numel != w[column::NUMEL] || row->columns != w.columns() ||
        row->start < w.start() || (row->start - w.start()) % row->columns != 0) {
      throw std::invalid_argument(piece + " has other elements than its row of the table");
    }
  }
}

Rows::Rows(const Format& format, const Memory& table, Spans spans)
    : format_(format),
      table_{reinterpret_cast<const int64_t*>(table.address), rows_of("table", table, "int64", column::WIDTH)} {
  for (int64_t i = 0; i < table_.size; ++i) {
    const Weight w = table_[i];
    const int64_t start = w.start(), owned = w[column::NUMEL], numel = numel_of(w.rows(), w.columns());
    if (spans == Spans::kUnread || owned == 0) continue;
    if (start < 0 || owned < 0 || start > numel || owned > numel - start) {
      throw std::invalid_argument("row " + std::to_string(i) + " owns " + std::to_string(owned) + " elements from " +
                                  std::to_string(start) + " on, of a weight of " + std::to_string(numel));
    }
  }
}

void Rows::check_inside(const Weight& weight, const Place& place, int64_t first, int64_t last) {
  const int64_t base = weight[place.base], offset = weight[place.offset];
  if (base < 0 || base >= static_cast<int64_t>(place.bases.size()) || !is_near(offset)) {
    throw std::invalid_argument(std::string(place.name) + " needs place " + std::to_string(offset) + " of tensor " +
                                std::to_string(base) + " of " + std::to_string(place.bases.size()));
  }
  const int64_t begin = offset * place.unit;
  check_reach(place.name, place.bases[base], place.dtype, begin + first, begin + last);
}

void Rows::check_masters(const char* name, const Memories& masters, const char* dtype) const {
  for (int64_t i = 0; i < table_.size; ++i) {
    const Weight w = table_[i];
    const int64_t base = w[column::MASTER_BASE], owned = w[column::NUMEL];
    if (owned == 0) continue;
    const bool is_there = base >= 0 && base < static_cast<int64_t>(masters.size());
    const int64_t unit = is_there ? size_of(array_of(name, masters[base]).dtype) : 1;
    check_inside(w, {name, masters, column::MASTER_BASE, column::MASTER_OFFSET, unit, dtype}, 0, owned * unit);
  }
}

void Rows::check_packed(const Memory& packed, bool of_all) const {
  if (format_.amax_policy == AmaxPolicy::kNone) return;
  const char* dtype = packed.dtype == "bfloat16" ? "bfloat16" : "float32";
  const int64_t unit = packed.dtype == "bfloat16" ? 2 : 4;
  const auto check = [&](int64_t first, int64_t count) {
    if (!is_near(first)) first = -1;
    check_reach("packed", packed, dtype, first * unit, (first + count) * unit);
  };
  for (int64_t i = 0; i < table_.size; ++i) {
    const Weight w = table_[i];
    if (!of_all && w[column::NUMEL] == 0) continue;
    const GridShape grid = grid_shape(format_.block, w.rows(), w.columns());
    check(w[column::ROW_AMAX], grid.down * grid.across);
    if (format_.columnwise == Columnwise::kOwnGrid) {
      const GridShape own = grid_shape(format_.columnwise_block, w.rows(), w.columns());
      check(w[column::COLUMN_AMAX], own.down * own.across);
    } else if (format_.scale_rule == ScaleRule::kTwoLevel && w[column::SHARED_AMAX] >= 0) {
      check(w[column::SHARED_AMAX], 1);
    }
    if (w[column::NOT_FINITE] >= 0) check(w[column::NOT_FINITE], 1);
  }
}

void Rows::check_codes(Dtype nominal, const Memories& row_data, const Memories* column_data) const {
  const bool has_codes = format_.element != Element::kNominal, own = format_.columnwise == Columnwise::kOwnGrid;
  const int64_t per_byte = format_.elements_per_byte(), size = has_codes ? 1 : size_of(nominal);
  for (int64_t i = 0; i < table_.size; ++i) {
    const Weight w = table_[i];
    if (w[column::NUMEL] == 0) continue;
    const int64_t first = w.start() / per_byte * size, last = (w.stop() + per_byte - 1) / per_byte * size;
    check_inside(w, {"row_data", row_data, column::ROW_DATA_BASE, column::ROW_DATA_OFFSET, 1, "bytes"}, first, last);
    if (own && column_data) {
      check_inside(w, {"column_data", *column_data, column::COLUMN_DATA_BASE, column::COLUMN_DATA_OFFSET, 1, "bytes"}, first,
                   last);
    }
  }
}

void Rows::check_whole_codes(const Memories& row_data, const Memories& column_data) const {
  for (int64_t i = 0; i < table_.size; ++i) {
    const Weight w = table_[i];
    const int64_t rowwise = code_bytes(format_, w.rows(), w.columns()), turned = code_bytes(format_, w.columns(), w.rows());
    check_inside(w, {"row_data", row_data, column::ROW_DATA_BASE, column::ROW_DATA_OFFSET, 1, "bytes"}, 0, rowwise);
    check_inside(w, {"column_data", column_data, column::COLUMN_DATA_BASE, column::COLUMN_DATA_OFFSET, 1, "bytes"}, 0,
                 turned);
  }
}

void Rows::check_scales(const Memories& row_scales, const Memories& column_scales, bool needs_columnwise) const {
  for (int64_t i = 0; i < table_.size; ++i) {
    const Weight w = table_[i];
    const auto check = [&](const char* name, const Memories& held, column::Column base, column::Column offset,
                           const ScaleBuffer& buffer) {
      const Place place{name, held, base, offset, buffer.entry, scale_dtype(buffer)};
      check_inside(w, place, 0, buffer.rows * buffer.row_bytes());
    };
    check("row_scales", row_scales, column::ROW_SCALE_BASE, column::ROW_SCALE_OFFSET,
          rowwise_scale_buffer(format_, w.rows(), w.columns()));
    if (!needs_columnwise) continue;
    check("column_scales", column_scales, column::COLUMN_SCALE_BASE, column::COLUMN_SCALE_OFFSET,
          columnwise_scale_buffer(format_, w.rows(), w.columns()));
  }
}

void Rows::check_floats(const char* name, const Memories& bases, column::Column base, column::Column offset, int64_t count,
                        bool of_all) const {
  for (int64_t i = 0; i < table_.size; ++i) {
    const Weight w = table_[i];
    if (of_all || w[column::NUMEL]) check_inside(w, {name, bases, base, offset, 4, "float32"}, 0, count * 4);
  }
}

void Rows::check_groups(const Memory& groups, const Memory& scalars) const {
  const int64_t rows = rows_of("scalars", scalars, "float32", 8);
  check_reach("groups", groups, "int64", table_.size * 8);
  for (int64_t i = 0; i < table_.size; ++i) {
    const int64_t group = reinterpret_cast<const int64_t*>(groups.address)[i];
    if (table_[i][column::NUMEL] && (group < 0 || group >= rows)) {
      throw std::invalid_argument("row " + std::to_string(i) + " takes row " + std::to_string(group) +
                                  " of the scalars, which have " + std::to_string(rows));
    }
  }
}

}  // namespace zerocast::api
