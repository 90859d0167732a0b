// Products with quantized matrices, for CPUs, as an XLA FFI call: y = x * (scale * code + offset)^T.
//
// One row is as fast as the codes come from memory: they are widened in registers, sixteen inputs
// to a vector, and become weights there, so that no f32 copy of the matrix is ever written. Up to
// four rows share one pass. With more rows a few outputs at a time are widened into a buffer that
// stays in the first caches, and all rows are multiplied by it.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "threads.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kRows = 4;        // of a register tile
constexpr int kOutputs = 4;     // of a register tile
constexpr int kTilesAhead = 4;  // codes are fetched so far ahead; more gains nothing
constexpr int64_t kTaskBytes = 64 << 10;    // of codes, below which no other thread is woken
constexpr int64_t kBlockBytes = 256 << 10;  // of x, to stay in the second-level cache

typedef int8_t SignedBytes __attribute__((vector_size(kLanes)));
typedef uint8_t UnsignedBytes __attribute__((vector_size(kLanes)));

template <typename Bytes>
inline IntVec LoadWide(const int8_t* p) {
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
#if defined(__x86_64__) && !defined(__clang__)
  asm("" : "+x"(bytes));  // GCC widens a vector that it knows to be in memory byte by byte
#endif
  return __builtin_convertvector(bytes, IntVec);
}

struct Problem {
  int64_t rows, inputs, outputs, group;
  const float* x;        // [rows][inputs]
  const int8_t* codes;   // [outputs][inputs], or [outputs][inputs / 2] of two nibbles
  const float* scales;   // [outputs][inputs / group]
  const float* offsets;  // like scales, or nullptr
  float* y;              // [rows][outputs]
};

// Sixteen int8 codes at a time, or two times sixteen nibbles: the low ones come first.
template <bool kNibbles>
struct Codes {
  static constexpr int kInputs = kNibbles ? 2 * kLanes : kLanes;
  static constexpr int kVectors = kInputs / kLanes;

  static int64_t RowBytes(const Problem& p) { return kNibbles ? p.inputs / 2 : p.inputs; }

  static void Widen(const int8_t* at, Vec (&codes)[kVectors]) {
    if constexpr (kNibbles) {
      const IntVec wide = LoadWide<UnsignedBytes>(at);
      codes[0] = __builtin_convertvector(wide & 15, Vec);
      codes[1] = __builtin_convertvector(wide >> 4, Vec);
    } else {
      codes[0] = __builtin_convertvector(LoadWide<SignedBytes>(at), Vec);
    }
  }
};

// Calls visit(output, first input, weights of a vector) for kOutputs outputs, input by input.
template <bool kNibbles, bool kOffsets, typename Visit>
inline void EachWeight(const Problem& p, int64_t first, Visit visit) {
  using C = Codes<kNibbles>;
  const int64_t groups = p.inputs / p.group, stride = C::RowBytes(p);
  const int8_t* codes[kOutputs];
  int64_t at[kOutputs];  // outputs past the last one are the last one again
  for (int o = 0; o < kOutputs; ++o) {
    const int64_t output = std::min(first + o, p.outputs - 1);
    codes[o] = p.codes + output * stride;
    at[o] = output * groups;
  }
  for (int64_t g = 0; g < groups; ++g) {
    Vec scale[kOutputs], offset[kOutputs];
    for (int o = 0; o < kOutputs; ++o) {
      scale[o] = Splat(p.scales[at[o] + g]);
      offset[o] = kOffsets ? Splat(p.offsets[at[o] + g]) : Vec{};
    }
#pragma GCC unroll 2  // lets GCC keep x in registers
    for (int64_t i = g * p.group; i < (g + 1) * p.group; i += C::kInputs) {
#pragma GCC unroll 4
      for (int o = 0; o < kOutputs; ++o) {
        Vec wide[C::kVectors];
        const int8_t* from = codes[o] + i / C::kVectors;
        __builtin_prefetch(from + kTilesAhead * kOutputs * stride, 0, 2);
        C::Widen(from, wide);
#pragma GCC unroll 2
        for (int v = 0; v < C::kVectors; ++v)
          visit(o, i + v * kLanes, kOffsets ? wide[v] * scale[o] + offset[o] : wide[v] * scale[o]);
      }
    }
  }
}

// Write kOutputs outputs of four rows, those of them that there are: sums[row][output].
inline void Write(const Problem& p, int64_t row, int rows, int64_t first, const Vec (&sums)[4][4]) {
  const Vec all = SumEach(sums);
  const int64_t outputs = std::min<int64_t>(kOutputs, p.outputs - first);
  for (int r = 0; r < rows; ++r)
    for (int o = 0; o < outputs; ++o) p.y[(row + r) * p.outputs + first + o] = all[4 * r + o];
}

// Outputs begin ... end - 1 of R rows, all of them.
template <bool kNibbles, bool kOffsets, int R>
void FewRows(const Problem& p, int64_t begin, int64_t end) {
  for (int64_t first = begin; first < end; first += kOutputs) {
    Vec sum[kRows][kOutputs] = {};
    EachWeight<kNibbles, kOffsets>(p, first, [&](int o, int64_t i, Vec weight) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r][o] += weight * Load(p.x + r * p.inputs + i);
    });
    Write(p, 0, R, first, sum);
  }
}

// kOutputs outputs of rows row ... row + R - 1 from their weights in f32.
template <int R>
inline void Tile(const Problem& p, const float* weights, int64_t row, int64_t first) {
  Vec sum[kRows][kOutputs] = {};
  const float* x = p.x + row * p.inputs;
#pragma GCC unroll 2  // as above
  for (int64_t i = 0; i < p.inputs; i += kLanes) {
    Vec column[R];
    for (int r = 0; r < R; ++r) column[r] = Load(x + r * p.inputs + i);
#pragma GCC unroll 4
    for (int o = 0; o < kOutputs; ++o) {
      const Vec weight = Load(weights + o * p.inputs + i);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r][o] += weight * column[r];
    }
  }
  Write(p, row, R, first, sum);
}

// Outputs begin ... end - 1 of rows row ... last - 1.
template <bool kNibbles, bool kOffsets>
void ManyRows(const Problem& p, int64_t row, int64_t last, int64_t begin, int64_t end) {
  std::vector<Vec> buffer(kOutputs * p.inputs / kLanes);  // whole cache lines
  float* weights = reinterpret_cast<float*>(buffer.data());
  for (int64_t first = begin; first < end; first += kOutputs) {
    EachWeight<kNibbles, kOffsets>(p, first, [&](int o, int64_t i, Vec weight) {
      Store(weights + o * p.inputs + i, weight);
    });
    int64_t r = row;
    for (; r + kRows <= last; r += kRows) Tile<kRows>(p, weights, r, first);
    if (last - r == 3) Tile<3>(p, weights, r, first);
    if (last - r == 2) Tile<2>(p, weights, r, first);
    if (last - r == 1) Tile<1>(p, weights, r, first);
  }
}

template <bool kNibbles, bool kOffsets>
void Run(const Problem& p, int64_t row, int64_t last, int64_t begin, int64_t end) {
  if (p.rows == 1) return FewRows<kNibbles, kOffsets, 1>(p, begin, end);
  if (p.rows == 2) return FewRows<kNibbles, kOffsets, 2>(p, begin, end);
  if (p.rows == 3) return FewRows<kNibbles, kOffsets, 3>(p, begin, end);
  if (p.rows == 4) return FewRows<kNibbles, kOffsets, 4>(p, begin, end);
  ManyRows<kNibbles, kOffsets>(p, row, last, begin, end);
}

ffi::Error Multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer codes,
                    ffi::Buffer<ffi::F32> scales, ffi::Buffer<ffi::F32> offsets,
                    ffi::Result<ffi::Buffer<ffi::F32>> y) {
  Problem p;
  p.rows = x.dimensions()[0];
  p.inputs = x.dimensions()[1];
  p.outputs = codes.dimensions()[0];
  p.group = p.inputs / scales.dimensions()[1];
  p.x = x.typed_data();
  p.codes = static_cast<const int8_t*>(codes.untyped_data());
  p.scales = scales.typed_data();
  p.offsets = offsets.element_count() ? offsets.typed_data() : nullptr;
  p.y = y->typed_data();
  const bool nibbles = codes.element_type() == ffi::U8;
  if (p.group % (nibbles ? 2 * kLanes : kLanes))
    return ffi::Error::InvalidArgument("group: expected a multiple of 16, of 32 for nibbles");
  if (nibbles && !p.offsets) return ffi::Error::InvalidArgument("nibbles: expected offsets");
  const auto run = nibbles ? Run<true, true> : p.offsets ? Run<false, true> : Run<false, false>;

  const int64_t bytes = p.outputs * p.inputs / (nibbles ? 2 : 1);
  const int64_t most = std::max<int64_t>(bytes * std::min<int64_t>(p.rows, 64) / kTaskBytes, 1);
  const int64_t tasks = std::min(most, 4 * NumThreads(pool));
  const int64_t outputs = CeilDiv(CeilDiv(p.outputs, tasks), kOutputs) * kOutputs;
  const int64_t blocks = CeilDiv(p.outputs, outputs);
  const int64_t fitting = std::max<int64_t>(kBlockBytes / (4 * p.inputs), 16) / kRows * kRows;
  const int64_t rows = std::min(p.rows, fitting);
  ShareTasks(pool, blocks * CeilDiv(p.rows, rows), [=](int64_t task) {
    const int64_t row = task / blocks * rows, begin = task % blocks * outputs;
    run(p, row, std::min(row + rows, p.rows), begin, std::min(begin + outputs, p.outputs));
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxstateMatmulQuantized, Multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
