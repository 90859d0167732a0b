// Vectors of sixteen floats, and sums across their lanes, for all kernels on CPUs.

#ifndef JAXSTATE_KERNELS_VECTORS_H_
#define JAXSTATE_KERNELS_VECTORS_H_

#include <algorithm>
#include <cstdint>

namespace {

constexpr int kLanes = 16;  // compilers split vectors on narrower machines

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef float LooseVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t LooseIntVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

inline Vec Load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
inline IntVec Load(const int32_t* p) { return *reinterpret_cast<const LooseIntVec*>(p); }
inline void Store(float* p, Vec v) { *reinterpret_cast<LooseVec*>(p) = v; }
inline Vec Splat(float x) { return x - Vec{}; }
inline Vec Max(Vec a, Vec b) { return a > b ? a : b; }

// Four floats, which every machine shuffles in one instruction.
typedef float Quad __attribute__((vector_size(16)));
typedef int32_t IntQuad __attribute__((vector_size(16)));
typedef float LooseQuad __attribute__((vector_size(16), aligned(4), may_alias));

inline Quad LoadQuad(const float* p) { return *reinterpret_cast<const LooseQuad*>(p); }
inline void Store(float* p, Quad v) { *reinterpret_cast<LooseQuad*>(p) = v; }

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define SHUFFLE_QUADS SHUFFLE
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntVec{__VA_ARGS__})
#define SHUFFLE_QUADS(a, b, ...) __builtin_shuffle(a, b, IntQuad{__VA_ARGS__})
#endif

// The largest lane, and the sum of all lanes.
inline float Highest(Vec v) {
  float lanes[kLanes];
  Store(lanes, v);
  Quad most = LoadQuad(lanes);
  for (int i = 4; i < kLanes; i += 4) {
    const Quad other = LoadQuad(lanes + i);
    most = most > other ? most : other;
  }
  return std::max(std::max(most[0], most[1]), std::max(most[2], most[3]));
}
inline float Total(Vec v) {
  float lanes[kLanes];
  Store(lanes, v);
  const Quad sum = LoadQuad(lanes) + LoadQuad(lanes + 4) + LoadQuad(lanes + 8) + LoadQuad(lanes + 12);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Fold two vectors, or pairs of them, into one: half as many lanes hold the sums of each.
inline Vec FoldLanes(Vec a, Vec b) {
  return SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
         SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
inline Vec FoldPairs(Vec a, Vec b) {
  return SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
         SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
inline Vec FoldHalves(Vec a, Vec b) {
  return SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
inline Vec FoldQuarters(Vec a, Vec b) {
  return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

// The sum of each of sixteen vectors: lane 4 * i + j is that of v[i][j].
inline Vec SumEach(const Vec (&v)[4][4]) {
  Vec four[4];
  for (int i = 0; i < 4; ++i)
    four[i] = FoldPairs(FoldLanes(v[i][0], v[i][1]), FoldLanes(v[i][2], v[i][3]));
  return FoldQuarters(FoldHalves(four[0], four[1]), FoldHalves(four[2], four[3]));
}

}  // namespace

#endif  // JAXSTATE_KERNELS_VECTORS_H_
