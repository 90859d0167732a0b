// Products of few rows with f32 matrices, for CPUs, as an XLA FFI call.
//
// They are as fast as the matrix comes from memory, so it is read once, in the order in which it
// lies there, whatever the number of rows. Where its inputs come first, tasks are parts of the
// inputs, so that each reads one piece of memory (columns of the matrix lie in as many pages as there
// are inputs, and finding those takes longer than reading); four inputs of a stretch of outputs at a
// time are added to the part's sums, and parts are added up at the end. Where its outputs come first,
// four outputs at a time are summed up in registers. Either way each sum is added up in an order
// that depends neither on other rows nor on threads.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "threads.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kMaxRows = 16;
constexpr int kStretch = 256;  // outputs of a task whose sums are in the first-level cache
constexpr int kInputs = 4;     // added to a sum at a time
constexpr int kSlab = 8;       // inputs of which all stretches are done before the next ones
constexpr int kSlabRows = 8;   // up to which that is done
constexpr int kMaxParts = 8;   // of the inputs
constexpr int kLeastPart = 128;  // inputs
constexpr int kPiece = 1024;   // most outputs of a task, a page of memory
constexpr int kOutputs = 4;    // of a register tile
constexpr int kTileRows = 4;   // of a register tile
constexpr int64_t kTaskBytes = 64 << 10;  // of the matrix, below which no other thread is woken

struct Problem {
  int64_t rows, inputs, outputs;
  const float* x;       // [rows][inputs]
  const float* matrix;  // [inputs][outputs], or [outputs][inputs]
  float* y;             // [rows][outputs]
};

// Up to a vector's lanes of what may end before the vector does; zeros behind it.
inline Vec LoadSome(const float* p, int64_t count) {
  Vec v = {};
  std::memcpy(&v, p, 4 * count);
  return v;
}

// Calls visit(number of rows, first of them) for all rows: eight, four, two or one at a time.
template <int kMost, typename Visit>
inline void EachRows(int64_t rows, Visit visit) {
  int64_t row = 0;
  if constexpr (kMost >= 8)
    for (; row + 8 <= rows; row += 8) visit(std::integral_constant<int, 8>(), row);
  for (; row + 4 <= rows; row += 4) visit(std::integral_constant<int, 4>(), row);
  for (; row + 2 <= rows; row += 2) visit(std::integral_constant<int, 2>(), row);
  if (row < rows) visit(std::integral_constant<int, 1>(), row);
}

// Add I inputs to the sums [R] of some vectors of outputs; x and weights are at the first.
template <int R, int I>
inline void AddInputs(const float* x, int64_t inputs, const float* weights, int64_t weights_stride,
                      int64_t vectors, float* sums, int64_t stride) {
  for (int64_t v = 0; v < vectors * kLanes; v += kLanes) {
    Vec weight[I];
#pragma GCC unroll 4
    for (int i = 0; i < I; ++i) weight[i] = Load(weights + i * weights_stride + v);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      Vec sum = Load(sums + r * stride + v);
#pragma GCC unroll 4
      for (int i = 0; i < I; ++i) sum += weight[i] * Splat(x[r * inputs + i]);
      Store(sums + r * stride + v, sum);
    }
  }
}

// Sums [rows][stride] of inputs first ... last - 1 to outputs begin ... end - 1.
void InputsFirst(const Problem& p, int64_t first, int64_t last, int64_t begin, int64_t end,
                 float* sums, int64_t stride) {
  alignas(64) float rest[kInputs * kLanes] = {};  // outputs that do not fill a vector
  for (int64_t r = 0; r < p.rows; ++r)
    std::memset(sums + r * stride + begin, 0, 4 * CeilDiv(end - begin, kLanes) * kLanes);

  auto add = [&](auto count, int64_t input, int64_t output, int64_t num_outputs) {
    constexpr int kCount = decltype(count)::value;
    const int64_t whole = num_outputs / kLanes, left = num_outputs % kLanes;
    const float* weights = p.matrix + input * p.outputs + output;
    if (left)
      for (int i = 0; i < kCount; ++i)
        std::memcpy(rest + i * kLanes, weights + i * p.outputs + whole * kLanes, 4 * left);
    if (input + kSlab + kCount <= last)
      for (int i = 0; i < kCount; ++i)
        for (int64_t o = 0; o < num_outputs; o += kLanes)
          __builtin_prefetch(weights + (kSlab + i) * p.outputs + o, 0, 2);
    EachRows<8>(p.rows, [&](auto rows, int64_t row) {
      constexpr int kRows = decltype(rows)::value;
      const float* x = p.x + row * p.inputs + input;
      float* to = sums + row * stride + output;
      AddInputs<kRows, kCount>(x, p.inputs, weights, p.outputs, whole, to, stride);
      if (left) AddInputs<kRows, kCount>(x, p.inputs, rest, kLanes, 1, to + whole * kLanes, stride);
    });
  };
  // Sums of many rows are worth more in the first-level cache than the order of memory.
  const int64_t slab_inputs = p.rows > kSlabRows ? last - first : kSlab;
  for (int64_t slab = first; slab < last; slab += slab_inputs) {
    const int64_t slab_end = std::min(slab + slab_inputs, last);
    for (int64_t output = begin; output < end; output += kStretch) {
      const int64_t num_outputs = std::min<int64_t>(kStretch, end - output);
      int64_t input = slab;
      for (; input + kInputs <= slab_end; input += kInputs)
        add(std::integral_constant<int, kInputs>(), input, output, num_outputs);
      for (; input < slab_end; ++input)
        add(std::integral_constant<int, 1>(), input, output, num_outputs);
    }
  }
}

// A matrix whose inputs come first. Parts depend on nothing but their number, so that an output is
// the same in any place.
void MultiplyInputsFirst(ffi::ThreadPool& pool, const Problem& p) {
  const int64_t most = std::clamp<int64_t>(p.inputs / kLeastPart, 1, kMaxParts);
  const int64_t part = std::max<int64_t>(CeilDiv(CeilDiv(p.inputs, most), kSlab), 1) * kSlab;
  const int64_t parts = std::max<int64_t>(CeilDiv(p.inputs, part), 1);
  const int64_t pieces = CeilDiv(p.outputs, kPiece);
  const int64_t piece = CeilDiv(CeilDiv(p.outputs, pieces), kLanes) * kLanes;
  const int64_t stride = CeilDiv(p.outputs, kLanes) * kLanes, size = p.rows * stride;
  const std::shared_ptr<float[]> sums(new float[parts * size]);
  const auto add = [=](int64_t task) {
    const int64_t first = task % parts * part, begin = task / parts * piece;
    InputsFirst(p, first, std::min(first + part, p.inputs), begin,
                std::min(begin + piece, p.outputs), sums.get() + task % parts * size, stride);
  };
  const auto merge = [=](int64_t row) {
    for (int64_t o = 0; o < p.outputs; o += kLanes) {
      const float* from = sums.get() + row * stride + o;
      Vec sum = Load(from);
      for (int64_t i = 1; i < parts; ++i) sum += Load(from + i * size);
      std::memcpy(p.y + row * p.outputs + o, &sum, 4 * std::min<int64_t>(kLanes, p.outputs - o));
    }
  };
  const auto each = [&](int64_t bytes, int64_t tasks, auto run) {
    if (bytes >= kTaskBytes) return ShareTasks(pool, tasks, run);
    for (int64_t task = 0; task < tasks; ++task) run(task);
  };
  each(4 * p.inputs * p.outputs, parts * CeilDiv(p.outputs, piece), add);
  each(4 * parts * size, p.rows, merge);
}

// kOutputs outputs of R rows of a matrix whose outputs come first; outputs past the last one are
// the last one again.
template <int R>
inline void Tile(const Problem& p, int64_t row, int64_t first) {
  const float* weights[kOutputs];
  for (int o = 0; o < kOutputs; ++o)
    weights[o] = p.matrix + std::min(first + o, p.outputs - 1) * p.inputs;
  const float* x = p.x + row * p.inputs;
  Vec sum[kTileRows][kOutputs] = {};
  int64_t i = 0;
#pragma GCC unroll 2  // lets GCC keep x in registers
  for (; i + kLanes <= p.inputs; i += kLanes) {
    Vec column[R];
    for (int r = 0; r < R; ++r) column[r] = Load(x + r * p.inputs + i);
#pragma GCC unroll 4
    for (int o = 0; o < kOutputs; ++o) {
      __builtin_prefetch(weights[o] + kOutputs * p.inputs + i);
      const Vec weight = Load(weights[o] + i);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r][o] += weight * column[r];
    }
  }
  if (const int64_t left = p.inputs - i)
    for (int o = 0; o < kOutputs; ++o)
      for (int r = 0; r < R; ++r)
        sum[r][o] += LoadSome(weights[o] + i, left) * LoadSome(x + r * p.inputs + i, left);
  const Vec all = SumEach(sum);
  const int64_t outputs = std::min<int64_t>(kOutputs, p.outputs - first);
  for (int r = 0; r < R; ++r)
    for (int o = 0; o < outputs; ++o) p.y[(row + r) * p.outputs + first + o] = all[4 * r + o];
}

void OutputsFirst(const Problem& p, int64_t begin, int64_t end) {
  for (int64_t first = begin; first < end; first += kOutputs)
    EachRows<kTileRows>(p.rows, [&](auto rows, int64_t row) {
      Tile<decltype(rows)::value>(p, row, first);
    });
}

ffi::Error Multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> matrix,
                    bool outputs_first, ffi::Result<ffi::Buffer<ffi::F32>> y) {
  Problem p;
  p.rows = x.dimensions()[0];
  p.inputs = x.dimensions()[1];
  p.outputs = y->dimensions()[1];
  p.x = x.typed_data();
  p.matrix = matrix.typed_data();
  p.y = y->typed_data();
  if (p.rows > kMaxRows) return ffi::Error::InvalidArgument("rows: expected at most 16");

  if (!outputs_first) {
    MultiplyInputsFirst(pool, p);
    return ffi::Error::Success();
  }
  const int64_t most = std::max<int64_t>(4 * p.inputs * p.outputs / kTaskBytes, 1);
  const int64_t tasks = std::min(most, 4 * NumThreads(pool));
  const int64_t block = std::max<int64_t>(CeilDiv(CeilDiv(p.outputs, tasks), kOutputs), 1) * kOutputs;
  ShareTasks(pool, CeilDiv(p.outputs, block), [p, block](int64_t task) {
    OutputsFirst(p, task * block, std::min((task + 1) * block, p.outputs));
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxstateMatmulFewRows, Multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("outputs_first")
                                  .Ret<ffi::Buffer<ffi::F32>>());
