// Attention of a step's tokens over pool cells and over each other, for CPUs, as an XLA FFI call.
//
// The meaning is that of attention_xla.py: tail part, context part, merge, normalize. What XLA's
// own matrix products cost here is copies (each stretch of the pool is copied out before it is
// multiplied) and a synchronisation of all threads per operation; this reads pages where they lie
// and synchronises once per layer.
//
// A block of 64 cells is S[row][cell] = sum over d of q[row][d] (broadcast) * k^T[d][cell], then
// O[row][d] += P[row][cell] (broadcast) * v[cell][d]: one product, in which a vector of keys or
// values is loaded once for twelve rows, and no lane is spent on a row that is not there. Keys are
// transposed a block at a time, for which few rows do not pay: their scores have lanes along d.
// An item is visited by the rows that see it, so that tokens of many sessions cost what they would
// cost one by one.
//
// Online softmax as in FlashAttention-2 (arXiv:2307.08691), the split over the context with a
// merge at the end as in Flash-Decoding.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "threads.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kCells = 64;    // cells per block
constexpr int kMaxRows = 96;  // rows per task
constexpr int kMaxDim = 256;  // largest head_dim
constexpr int kFewRows = 4;   // of one token, up to here scores have lanes along d
constexpr int32_t kPaddingRow = 1 << 30;  // PADDING_ROW of work.py
#ifdef __AVX512F__
constexpr int kTileRows = 12;  // of sums that are in registers at a time, as pairs of vectors
#else
constexpr int kTileRows = 2;
#endif
constexpr int kPanel = 2 * kLanes;  // columns of a product taken at a time
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

// Scores are kept times log2(e), so that the softmax is of powers of two.
constexpr float kLog2E = 1.44269504f;

inline Vec Exp2(Vec x) {
  // 2^n * 2^r with |r| <= 1/2; the polynomial is accurate to about one unit in the last place.
  const Vec magic = Splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = x + magic;
  const Vec r = x - (shifted - magic);
  Vec p = Splat(1.5353361912e-4f);
  p = p * r + 1.3398874414e-3f;
  p = p * r + 9.6184373577e-3f;
  p = p * r + 5.5503324711e-2f;
  p = p * r + 2.4022647914e-1f;
  p = p * r + 6.9314720286e-1f;
  p = p * r + 1.0f;
  const Vec result = (Vec)((IntVec)p + ((IntVec)shifted << 23));  // magic's low bits are zero
  return x > -126.0f ? result : Vec{};
}

// Columns of a work item, as in work.py.
enum Column { kStart, kFirst, kFill, kBase, kShift, kRowBegin, kRowEnd, kBlock, kColumns };

struct Problem {
  int64_t tokens, heads, kv_heads, head_dim, shared, cells, block_tokens;
  int32_t window;  // 0 = none
  float scale;
  const float *q, *k_tail, *v_tail, *k_cells, *v_cells, *cos, *sin;
  const bool* tail_visible;  // [all_tokens][all_tokens], row = query token
  int64_t all_tokens;        // padding included
  const int32_t *positions, *token_rows, *items;
  int32_t num_items;
  float* out;
};

// Unnormalized attention of the rows of one task.
struct State {
  float *peak, *total, *mixed;  // [row], [row], [row][d]

  static int64_t Size(int64_t rows, int64_t dim) { return rows * (2 + dim); }
  State(float* at, int64_t rows, int64_t dim)
      : peak(at + rows * dim), total(peak + rows), mixed(at) {}
};

// Rows of one head over a share of the context, given as a range of cells counted over all items.
struct Task {
  int64_t head, first, count, begin, end, group;  // first row = token * shared + head of the group
  bool tail;
};

bool Sees(const Problem& p, int64_t token, const int32_t* item) {
  return p.token_rows[token] >= item[kRowBegin] && p.token_rows[token] < item[kRowEnd] &&
         token / p.block_tokens == item[kBlock];
}

// The rows of a task from the first to the last that sees an item.
struct Rows {
  int64_t head, first, count = 0;
  int32_t min_position = std::numeric_limits<int32_t>::max();
  int32_t max_position = std::numeric_limits<int32_t>::min();
  bool all = true;  // see the item
  bool few;         // are of one token (a number that does not depend on the order of rows)

  Rows(const Problem& p, const Task& task, const int32_t* item) : head(task.head) {
    int64_t end = (task.first + task.count - 1) / p.shared + 1, token = task.first / p.shared;
    while (token < end && !Sees(p, token, item)) ++token;
    while (token < end && !Sees(p, end - 1, item)) --end;
    first = std::max(token * p.shared, task.first);
    count = std::max<int64_t>(std::min(end * p.shared, task.first + task.count) - first, 0);
    few = end - token == 1 && p.shared <= kFewRows;
    for (; token < end; ++token) {
      all = all && Sees(p, token, item);
      min_position = std::min(min_position, p.positions[token]);
      max_position = std::max(max_position, p.positions[token]);
    }
  }

  Rows(const Problem& p, const Task& task)
      : head(task.head), first(task.first), count(task.count) {
    few = p.tokens == 1 && p.shared <= kFewRows;
  }

  // Whether a cell is outside the window of all rows.
  bool Passed(const Problem& p, int32_t position) const {
    return p.window && min_position - position >= p.window;
  }
};

// Scaled queries [row][d], turned back by an item's shift (item < 0: not turned).
void LoadQueries(const Problem& p, const Rows& rows, int32_t item, float* q) {
  const int64_t half = p.head_dim / 2;
  for (int64_t i = 0; i < rows.count; ++i, q += p.head_dim) {
    const int64_t row = rows.first + i;
    const float* source =
        p.q + ((row / p.shared) * p.heads + rows.head * p.shared + row % p.shared) * p.head_dim;
    for (int64_t d = 0; d < half; ++d) {
      const float left = source[d] * p.scale, right = source[d + half] * p.scale;
      const float c = item < 0 ? 1.0f : p.cos[item * half + d];
      const float s = item < 0 ? 0.0f : -p.sin[item * half + d];
      q[d] = left * c - right * s;
      q[d + half] = right * c + left * s;
    }
  }
}

// Up to kCells cells: where their keys and values lie, and who sees them.
struct Cells {
  const float *k, *v;
  int64_t stride;
  int count;
  int32_t base;         // context cells: position of the first
  const int32_t* item;  // context cells: their item; nullptr = the step's own tokens
  const bool* visible;  // the step's own tokens: where they stand in the row of the first token
  bool all_visible;
};

// Make the scores [row][kCells] that a row must not see -inf.
void Mask(const Problem& p, const Rows& rows, const Cells& cells, float* scores) {
  const int32_t window = p.window ? p.window : std::numeric_limits<int32_t>::max();
  for (int64_t r = 0; r < rows.count; ++r, scores += kCells) {
    const int64_t token = (rows.first + r) / p.shared;
    if (cells.item == nullptr) {
      const bool* visible = cells.visible + token * p.all_tokens;
      for (int c = 0; c < cells.count; ++c) scores[c] = visible[c] ? scores[c] : kMinusInf;
      continue;
    }
    const bool sees = rows.all || Sees(p, token, cells.item);
    for (int c = 0; c < cells.count; ++c) {
      const int32_t distance = p.positions[token] - (cells.base + c);
      scores[c] = sees & (distance >= 0) & (distance < window) ? scores[c] : kMinusInf;
    }
  }
}

inline void Fetch(const float* at) { __builtin_prefetch(at, 0, 2); }

// c[R][W vectors] = c times kept (0 if null) + a[R][inner] times b[inner][W vectors]. Meanwhile as
// much of what lies at `ahead` (if not null) is fetched into the second-level cache: loads that come
// late do not wake the hardware's own prefetch. A wrong guess costs nothing. Each sum is added up in
// the same order whatever R and W.
template <int R, int W>
void Multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t inner,
              const float* kept, float* c, int64_t c_stride, const float* ahead) {
  Vec sum[R][W];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int j = 0; j < W; ++j)
      sum[r][j] = kept ? Load(c + r * c_stride + j * kLanes) * kept[r] : Vec{};
  for (int64_t i = 0; i < inner; ++i) {
    Vec part[W];
#pragma GCC unroll 2
    for (int j = 0; j < W; ++j) {
      if (ahead) Fetch(ahead + (i * W + j) * kLanes);
      part[j] = Load(b + i * b_stride + j * kLanes);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec factor = Splat(a[r * a_stride + i]);
#pragma GCC unroll 2
      for (int j = 0; j < W; ++j) sum[r][j] += part[j] * factor;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int j = 0; j < W; ++j) Store(c + r * c_stride + j * kLanes, sum[r][j]);
}

// One kPanel of columns of all rows, in tiles of rows as even as can be.
template <int W, int... I>
void MultiplyRows(std::integer_sequence<int, I...>, int64_t rows, const float* a, int64_t a_stride,
                  const float* b, int64_t b_stride, int64_t inner, const float* kept, float* c,
                  int64_t c_stride, const float* ahead) {
  static constexpr decltype(&Multiply<1, W>) kOf[] = {Multiply<I + 1, W>...};
  const int64_t tiles = CeilDiv(rows, kTileRows);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t first = rows * tile / tiles, count = rows * (tile + 1) / tiles - first;
    kOf[count - 1](a + first * a_stride, a_stride, b, b_stride, inner,
                   kept ? kept + first : nullptr, c + first * c_stride, c_stride,
                   tile == 0 ? ahead : nullptr);
  }
}

// The same for any number of vectors; panels of b are `b_panel` floats apart.
void MultiplyAll(int64_t rows, int64_t vectors, const float* a, int64_t a_stride, const float* b,
                 int64_t b_stride, int64_t b_panel, int64_t inner, const float* kept, float* c,
                 int64_t c_stride, const float* ahead) {
  constexpr std::make_integer_sequence<int, kTileRows> kCounts;
  for (; vectors > 1; vectors -= 2, b += b_panel, c += kPanel) {
    MultiplyRows<2>(kCounts, rows, a, a_stride, b, b_stride, inner, kept, c, c_stride, ahead);
    if (ahead) ahead += inner * kPanel;
  }
  if (vectors)
    MultiplyRows<1>(kCounts, rows, a, a_stride, b, b_stride, inner, kept, c, c_stride, ahead);
}

// Keys as panels [d][kPanel]; the last one is repeated up to a whole vector.
void Transpose(const Cells& cells, int64_t dim, float* keys) {
  const int padded = CeilDiv(cells.count, kLanes) * kLanes;
  for (int c = 0; c < padded; c += 4) {
    const float* from[4];
    for (int i = 0; i < 4; ++i) from[i] = cells.k + std::min(c + i, cells.count - 1) * cells.stride;
    float* to = keys + c / kPanel * kPanel * dim + c % kPanel;
    for (int64_t d = 0; d < dim; d += 4, to += 4 * kPanel) {
      const Quad k0 = LoadQuad(from[0] + d), k1 = LoadQuad(from[1] + d);
      const Quad k2 = LoadQuad(from[2] + d), k3 = LoadQuad(from[3] + d);
      const Quad low0 = SHUFFLE_QUADS(k0, k1, 0, 4, 1, 5), low2 = SHUFFLE_QUADS(k2, k3, 0, 4, 1, 5);
      const Quad top0 = SHUFFLE_QUADS(k0, k1, 2, 6, 3, 7), top2 = SHUFFLE_QUADS(k2, k3, 2, 6, 3, 7);
      Store(to, SHUFFLE_QUADS(low0, low2, 0, 1, 4, 5));
      Store(to + kPanel, SHUFFLE_QUADS(low0, low2, 2, 3, 6, 7));
      Store(to + 2 * kPanel, SHUFFLE_QUADS(top0, top2, 0, 1, 4, 5));
      Store(to + 3 * kPanel, SHUFFLE_QUADS(top0, top2, 2, 3, 6, 7));
    }
  }
}

// Scores [row][kCells] of R <= kFewRows rows.
template <int R>
void ScoreFew(const Cells& cells, const float* q, int64_t dim, float* scores, const float* ahead) {
  for (int c = 0; c < cells.count; c += 4) {
    Vec sum[4][4] = {};
    const float* keys[4];
    for (int i = 0; i < 4; ++i) keys[i] = cells.k + std::min(c + i, cells.count - 1) * cells.stride;
    for (int64_t d = 0; d < dim; d += kLanes) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        if (ahead) Fetch(ahead + (c + i) * dim + d);
        const Vec part = Load(keys[i] + d);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[r][i] += Load(q + r * dim + d) * part;
      }
    }
    float all[kLanes];
    Store(all, SumEach(sum));
    for (int r = 0; r < R; ++r) Store(scores + r * kCells + c, LoadQuad(all + 4 * r));
  }
}

struct Scratch {  // of a thread
  alignas(64) float queries[kMaxRows * kMaxDim];
  alignas(64) float keys[kMaxDim * kCells];
  alignas(64) float scores[kMaxRows * kCells];
};

// One block of cells against the rows; peak, total and mixed are those of the first.
void Visit(const Problem& p, const Rows& rows, const Cells& cells, Scratch& scratch, float* peak,
           float* total, float* mixed) {
  const int64_t dim = p.head_dim, vectors = CeilDiv(cells.count, kLanes);
  const bool whole = cells.item && cells.count == kCells;
  // Sums must not depend on where in a step a row's own tokens stand.
  const bool in_order = cells.item == nullptr && p.tokens <= kCells;
  const float* next_k = whole ? cells.k + kCells * dim : nullptr;
  const float* next_v = whole ? cells.v + kCells * dim : nullptr;
  const float* q = scratch.queries;
  float* scores = scratch.scores;
  if (rows.few) {
    static constexpr decltype(&ScoreFew<1>) kOf[] = {ScoreFew<1>, ScoreFew<2>, ScoreFew<3>,
                                                     ScoreFew<4>};
    kOf[rows.count - 1](cells, q, dim, scores, next_k);
  } else {
    Transpose(cells, dim, scratch.keys);
    MultiplyAll(rows.count, vectors, q, dim, scratch.keys, kPanel, dim * kPanel, dim, nullptr,
                scores, kCells, next_k);
  }
  if (!cells.all_visible) Mask(p, rows, cells, scores);
  alignas(64) float floor[kMaxRows], kept[kMaxRows];
  for (int64_t r = 0; r < rows.count; ++r) {
    float* row = scores + r * kCells;
    std::fill(row + cells.count, row + vectors * kLanes, kMinusInf);
    Vec highest = Load(row);
    for (int j = 1; j < vectors; ++j) highest = Max(highest, Load(row + j * kLanes));
    const float before = peak[r];
    peak[r] = std::max(before, Highest(highest));
    floor[r] = peak[r] > kMinusInf ? peak[r] : 0.0f;
    kept[r] = before - floor[r];
  }
  for (int64_t r = 0; r < rows.count; r += kLanes) Store(kept + r, Exp2(Load(kept + r)));
  for (int64_t r = 0; r < rows.count; ++r) {
    Vec sum = {};
    for (int j = 0; j < vectors; ++j) {
      float* at = scores + r * kCells + j * kLanes;
      const Vec weight = Exp2(Load(at) - floor[r]);
      Store(at, weight);
      sum += weight;
    }
    total[r] *= kept[r];
    if (in_order)
      for (int c = 0; c < cells.count; ++c) total[r] += scores[r * kCells + c];
    else
      total[r] += Total(sum);
  }
  MultiplyAll(rows.count, dim / kLanes, scores, kCells, cells.v, cells.stride, kPanel, cells.count,
              kept, mixed, dim, next_v);
}

// Whether a task's rows see any of the step's own tokens from `first` on, a block of them.
bool SeesAny(const Problem& p, const Task& task, int64_t first) {
  const int64_t end = (task.first + task.count - 1) / p.shared + 1;
  for (int64_t token = task.first / p.shared; token < end; ++token) {
    const bool* visible = p.tail_visible + token * p.all_tokens + first;
    if (std::memchr(visible, true, std::min<int64_t>(kCells, p.tokens - first))) return true;
  }
  return false;
}

void Run(const Problem& p, const Task& task, const State& state) {
  static thread_local Scratch scratch;
  std::fill_n(state.peak, task.count, kMinusInf);
  std::fill_n(state.total, task.count, 0.0f);
  std::fill_n(state.mixed, task.count * p.head_dim, 0.0f);
  const auto visit = [&](const Rows& rows, const Cells& cells) {
    const int64_t r = rows.first - task.first;
    Visit(p, rows, cells, scratch, state.peak + r, state.total + r,
          state.mixed + r * p.head_dim);
  };
  if (task.tail) {
    const Rows rows(p, task);
    LoadQueries(p, rows, -1, scratch.queries);
    for (int64_t token = 0; token < p.tokens; token += kCells) {
      if (!SeesAny(p, task, token)) continue;
      Cells cells;
      cells.stride = p.kv_heads * p.head_dim;
      cells.k = p.k_tail + token * cells.stride + rows.head * p.head_dim;
      cells.v = p.v_tail + token * cells.stride + rows.head * p.head_dim;
      cells.count = std::min<int64_t>(kCells, p.tokens - token);
      cells.base = 0;
      cells.item = nullptr;
      cells.visible = p.tail_visible + token;
      cells.all_visible = false;
      visit(rows, cells);
    }
  }
  int64_t counted = 0, loaded_first = -1, loaded_count = 0;
  int32_t loaded_shift = 0;
  for (int32_t index = 0; index < p.num_items && counted < task.end; ++index) {
    const int32_t* item = p.items + index * kColumns;
    const int64_t length = std::max(item[kFill] - item[kFirst], 0);
    const int64_t begin = std::max<int64_t>(task.begin - counted, 0);
    const int64_t end = std::min(task.end - counted, length);
    counted += length;
    if (begin >= end) continue;
    const Rows rows(p, task, item);
    if (rows.count == 0) continue;
    if (item[kShift] != loaded_shift || rows.first != loaded_first || rows.count != loaded_count) {
      loaded_shift = item[kShift];
      loaded_first = rows.first;
      loaded_count = rows.count;
      LoadQueries(p, rows, loaded_shift ? index : -1, scratch.queries);
    }
    for (int64_t at = begin; at < end; at += kCells) {
      const int64_t cell = item[kFirst] + at;
      const int64_t flat = rows.head * p.cells + item[kStart] + cell;
      Cells cells;
      cells.stride = p.head_dim;
      cells.k = p.k_cells + flat * p.head_dim;
      cells.v = p.v_cells + flat * p.head_dim;
      cells.count = std::min<int64_t>(kCells, end - at);
      cells.base = item[kBase] + static_cast<int32_t>(cell);
      // Most of a long context is outside a sliding window, or behind a repair.
      const int32_t last = cells.base + cells.count - 1;
      if (cells.base > rows.max_position || rows.Passed(p, last)) continue;
      cells.item = item;
      cells.visible = nullptr;
      cells.all_visible = rows.all && p.window == 0 && last <= rows.min_position;
      visit(rows, cells);
    }
  }
}

// Merge the shares of one group of rows, normalize, and write them out.
void Finish(const Problem& p, const Task& task, const std::vector<State>& shares) {
  std::vector<float> weight(shares.size());
  for (int64_t i = 0; i < task.count; ++i) {
    float peak = kMinusInf, total = 0.0f;
    for (const State& share : shares) peak = std::max(peak, share.peak[i]);
    for (size_t s = 0; s < shares.size(); ++s) {
      weight[s] = shares[s].peak[i] > kMinusInf ? std::exp2(shares[s].peak[i] - peak) : 0.0f;
      total += weight[s] * shares[s].total[i];
    }
    const int64_t row = task.first + i;
    float* out = p.out + ((row / p.shared) * p.heads + task.head * p.shared + row % p.shared) *
                             p.head_dim;
    for (int64_t d = 0; d < p.head_dim; d += kLanes) {
      Vec sum = {};
      for (size_t s = 0; s < shares.size(); ++s)
        if (weight[s] > 0.0f) sum += Load(shares[s].mixed + i * p.head_dim + d) * weight[s];
      Store(out + d, total > 0.0f ? sum / total : Vec{});
    }
  }
}

// What threads share; outlives the call in the hands of a thread that came too late.
struct Call {
  Problem problem;
  std::vector<Task> tasks;
  std::vector<std::atomic<int64_t>> left;  // shares per group, if several
  std::unique_ptr<float[]> states;         // of all tasks, if groups have several shares
  int64_t num_shares, state_size;

  State StateOf(int64_t index) const {
    return State(states.get() + index * state_size, tasks[index].count, problem.head_dim);
  }

  void Do(int64_t index) {
    const Task& task = tasks[index];
    if (num_shares == 1) {
      alignas(64) static thread_local float only[kMaxRows * (2 + kMaxDim)];
      const State state(only, task.count, problem.head_dim);
      Run(problem, task, state);
      Finish(problem, task, {state});
      return;
    }
    Run(problem, task, StateOf(index));
    if (left[task.group].fetch_sub(1) > 1) return;
    std::vector<State> shares;
    for (int64_t s = 0; s < num_shares; ++s) shares.push_back(StateOf(task.group * num_shares + s));
    Finish(problem, task, shares);
  }
};

ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k_tail,
                  ffi::Buffer<ffi::F32> v_tail, ffi::Buffer<ffi::S32> positions,
                  ffi::Buffer<ffi::S32> token_rows, ffi::Buffer<ffi::PRED> tail_visible,
                  ffi::Buffer<ffi::F32> k_pages, ffi::Buffer<ffi::F32> v_pages,
                  ffi::Buffer<ffi::S32> items, ffi::Buffer<ffi::S32> count,
                  ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin, int32_t block_tokens,
                  int32_t window, ffi::Result<ffi::Buffer<ffi::F32>> out) {
  auto call = std::make_shared<Call>();
  Problem& p = call->problem;
  p.tokens = q.dimensions()[0];
  p.heads = q.dimensions()[1];
  p.head_dim = q.dimensions()[2];
  p.kv_heads = k_pages.dimensions()[0];
  p.cells = k_pages.dimensions()[1] * k_pages.dimensions()[2];
  p.shared = p.heads / p.kv_heads;
  p.block_tokens = block_tokens;
  p.window = window;
  p.scale = kLog2E / std::sqrt(static_cast<float>(p.head_dim));
  p.q = q.typed_data();
  p.k_tail = k_tail.typed_data();
  p.v_tail = v_tail.typed_data();
  p.k_cells = k_pages.typed_data();
  p.v_cells = v_pages.typed_data();
  p.cos = cos.typed_data();
  p.sin = sin.typed_data();
  p.positions = positions.typed_data();
  p.token_rows = token_rows.typed_data();
  p.items = items.typed_data();
  p.tail_visible = tail_visible.typed_data();
  p.all_tokens = p.tokens;
  p.num_items = count.typed_data()[0];
  p.out = out->typed_data();
  if (p.head_dim % kLanes || p.head_dim > kMaxDim)
    return ffi::Error::InvalidArgument("head_dim: expected a multiple of 16 up to 256");

  int64_t context = 0;
  for (int32_t i = 0; i < p.num_items; ++i)
    context += std::max(p.items[i * kColumns + kFill] - p.items[i * kColumns + kFirst], 0);
  // Padding at the end costs nothing: questions are rarely as long as the step's shape.
  while (p.tokens > 0 && p.token_rows[p.tokens - 1] >= kPaddingRow) --p.tokens;
  std::fill(p.out + p.tokens * p.heads * p.head_dim, p.out + p.all_tokens * p.heads * p.head_dim,
            0.0f);
  if (p.tokens == 0) return ffi::Error::Success();
  const int64_t rows = p.tokens * p.shared;
  const int64_t chunks = CeilDiv(rows, kMaxRows);
  const int64_t per_chunk = CeilDiv(rows, chunks);
  // Enough shares that the threads stay even, none so short that the merge would show.
  int64_t wanted = CeilDiv(4 * NumThreads(pool), p.kv_heads * chunks);
  // As many tasks for each thread, if a few more shares do.
  for (int64_t more = wanted; more < 2 * wanted; ++more) {
    if (more * p.kv_heads * chunks % NumThreads(pool)) continue;
    wanted = more;
    break;
  }
  call->num_shares = std::max<int64_t>(1, std::min(wanted, context / 256));
  for (int64_t head = 0; head < p.kv_heads; ++head) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t group = head * chunks + chunk;
      const int64_t first = chunk * per_chunk;
      for (int64_t share = 0; share < call->num_shares; ++share) {
        const auto edge = [&](int64_t s) {
          return s == call->num_shares ? context : context * s / call->num_shares / kCells * kCells;
        };
        call->tasks.push_back({head, first, std::min(per_chunk, rows - first), edge(share),
                              edge(share + 1), group, share == 0});
      }
    }
  }
  if (call->num_shares > 1) {
    call->state_size = CeilDiv(State::Size(per_chunk, p.head_dim), kLanes) * kLanes;
    call->states.reset(new float[call->state_size * call->tasks.size()]);
    call->left = std::vector<std::atomic<int64_t>>(p.kv_heads * chunks);
    for (auto& left : call->left) left = call->num_shares;
  }
  ShareTasks(pool, call->tasks.size(), [call](int64_t index) { call->Do(index); });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxstateAttention, Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<int32_t>("block_tokens")
                                  .Attr<int32_t>("window")
                                  .Ret<ffi::Buffer<ffi::F32>>());
