// Attention of a step's tokens over pool cells and over each other, for CPUs, as an XLA FFI call.
//
// The meaning is that of attention_xla.py: tail part, context part, merge, normalize. What XLA's
// own matrix products cost here is copies (each stretch of the pool is copied out before it is
// multiplied) and a synchronisation of all threads per operation; this reads pages where they lie
// and synchronises once per layer.
//
// Query rows are vector lanes. A block of 64 cells is scored as S^T[cell][row] = sum over d of
// k[cell][d] (broadcast) * q^T[d][row], so neither keys nor values are ever transposed, the
// softmax needs no horizontal sums, and P^T is already in place for O^T[d][row] += v[cell][d] *
// P^T[cell][row]. Rows that would leave most lanes of a vector idle, four at most, are taken with
// lanes along d instead, beside the others, while the block is in cache.
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
#include <thread>
#include <vector>

#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kCells = 64;       // cells per block
constexpr int kFewCells = 32;    // the same for few rows: less to keep while memory is read
constexpr int kMaxVectors = 6;   // vectors of rows per task
constexpr int kMaxDim = 256;     // largest head_dim
constexpr int32_t kPaddingRow = 1 << 30;  // PADDING_ROW of work.py
constexpr int kFewRows = 4;      // up to here the lanes run along d
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
  const float* tail_bias;  // [tokens][tail_stride]: 0 or -inf for (cell, query row)
  int64_t tail_stride;
  const int32_t *positions, *token_rows, *items;
  int32_t num_items;
  float* out;
};

// Unnormalized attention of the rows of one task: of a part by lane [d][row], of few rows [row][d].
struct State {
  alignas(64) float peak[kMaxVectors * kLanes];
  alignas(64) float total[kMaxVectors * kLanes];
  alignas(64) float mixed[kMaxDim * kMaxVectors * kLanes];
};

struct Sums {  // the share of one part of a task's rows in its State
  float *peak, *total, *mixed;
};

struct Rows {  // query rows that are visited together
  int64_t head, first, count;  // first row = token * shared + head within the group
  alignas(64) int32_t position[kMaxVectors * kLanes];
  alignas(64) int32_t row[kMaxVectors * kLanes];
  alignas(64) int32_t block[kMaxVectors * kLanes];
  int32_t min_position, max_position, min_row, max_row, min_block, max_block;
};

void Describe(const Problem& p, Rows& rows) {
  rows.min_position = rows.min_row = rows.min_block = std::numeric_limits<int32_t>::max();
  rows.max_position = rows.max_row = rows.max_block = std::numeric_limits<int32_t>::min();
  for (int i = 0; i < kMaxVectors * kLanes; ++i) {
    if (i >= rows.count) {  // padding lanes see nothing
      rows.position[i] = std::numeric_limits<int32_t>::min() / 2;
      rows.row[i] = rows.block[i] = -1;
      continue;
    }
    const int32_t token = (rows.first + i) / p.shared;
    rows.position[i] = p.positions[token];
    rows.row[i] = p.token_rows[token];
    rows.block[i] = token / p.block_tokens;
    rows.min_position = std::min(rows.min_position, rows.position[i]);
    rows.max_position = std::max(rows.max_position, rows.position[i]);
    rows.min_row = std::min(rows.min_row, rows.row[i]);
    rows.max_row = std::max(rows.max_row, rows.row[i]);
    rows.min_block = std::min(rows.min_block, rows.block[i]);
    rows.max_block = std::max(rows.max_block, rows.block[i]);
  }
}

// Scaled queries, turned back by an item's shift (item < 0: not turned); [d][lane] or [row][d].
void LoadQueries(const Problem& p, const Rows& rows, int32_t item, bool by_lane, float* q) {
  const int64_t half = p.head_dim / 2;
  const int64_t lanes = by_lane ? (rows.count + kLanes - 1) / kLanes * kLanes : rows.count;
  for (int64_t i = 0; i < lanes; ++i) {
    const float* source = nullptr;
    if (i < rows.count) {
      const int64_t row = rows.first + i;
      source = p.q + ((row / p.shared) * p.heads + rows.head * p.shared + row % p.shared) *
                         p.head_dim;
    }
    for (int64_t d = 0; d < half; ++d) {
      float left = source ? source[d] * p.scale : 0.0f;
      float right = source ? source[d + half] * p.scale : 0.0f;
      if (item >= 0) {
        const float c = p.cos[item * half + d], s = -p.sin[item * half + d];
        const float turned = left * c - right * s;
        right = right * c + left * s;
        left = turned;
      }
      if (by_lane) {
        q[d * lanes + i] = left;
        q[(d + half) * lanes + i] = right;
      } else {
        q[i * p.head_dim + d] = left;
        q[i * p.head_dim + d + half] = right;
      }
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
  const float* bias;    // the step's own tokens: row of tail_bias, at the task's first row
  bool all_visible;
};

bool AllVisible(const Problem& p, const Rows& rows, const int32_t* item, int32_t last_position) {
  return p.window == 0 && last_position <= rows.min_position && rows.min_row >= item[kRowBegin] &&
         rows.max_row < item[kRowEnd] && rows.min_block == item[kBlock] &&
         rows.max_block == item[kBlock];
}

// Add -inf to the scores [cell][lane] that a row must not see.
template <int NV>
void MaskLanes(const Problem& p, const Rows& rows, const Cells& cells, float* scores) {
  constexpr int kWidth = NV * kLanes;
  if (cells.item == nullptr) {
    for (int c = 0; c < cells.count; ++c)
      for (int at = 0; at < kWidth; at += kLanes) {
        float* score = scores + c * kWidth + at;
        Store(score, Load(score) + Load(cells.bias + c * p.tail_stride + at));
      }
    return;
  }
  const int32_t window = p.window ? p.window : std::numeric_limits<int32_t>::max();
  for (int at = 0; at < kWidth; at += kLanes) {
    const IntVec position = Load(rows.position + at), row = Load(rows.row + at);
    const IntVec member = (row >= cells.item[kRowBegin]) & (row < cells.item[kRowEnd]) &
                          (Load(rows.block + at) == cells.item[kBlock]);
    for (int c = 0; c < cells.count; ++c) {
      const IntVec distance = position - (cells.base + c);
      const IntVec visible = member & (distance >= 0) & (distance < window);
      float* score = scores + c * kWidth + at;
      Store(score, visible ? Load(score) : Splat(kMinusInf));
    }
  }
}

bool Sees(const Problem& p, const Rows& rows, int lane, const Cells& cells, int cell) {
  if (cells.item == nullptr) return cells.bias[cell * p.tail_stride + lane] == 0.0f;
  const int32_t distance = rows.position[lane] - (cells.base + cell);
  return rows.row[lane] >= cells.item[kRowBegin] && rows.row[lane] < cells.item[kRowEnd] &&
         rows.block[lane] == cells.item[kBlock] && distance >= 0 &&
         (p.window == 0 || distance < p.window);
}

// The next block is fetched into the second-level cache while this one is worked on, keys during
// the scores and values during the mixture: broadcasts of single floats do not wake the hardware's
// own prefetch, and the first level has no room to spare. A wrong guess costs nothing.
constexpr int kLine = 16;  // floats per cache line
inline void Fetch(const float* at) { __builtin_prefetch(at, 0, 2); }

// Sums that a register tile holds: cells, then dims, times NV vectors, of the 32 registers.
template <int NV>
constexpr int kRegisterTile = NV == 1 ? 16 : NV == 2 ? 12 : NV == 3 ? 8 : NV == 4 ? 6 : 4;

// Dims d ... d + N - 1 of the mixture: kept sums, plus weights [cell][lane] times values.
template <int NV, int N>
inline void MixLanes(const Cells& cells, const float* weights, const Vec* kept, int64_t d,
                     const Sums& state) {
  constexpr int kWidth = NV * kLanes;
  const int64_t line = (d + kLine - 1) / kLine * kLine;  // the one that begins in this tile
  Vec sum[N][NV];
  float* mixed = state.mixed + d * kWidth;
  for (int i = 0; i < N; ++i)
    for (int j = 0; j < NV; ++j) sum[i][j] = Load(mixed + i * kWidth + j * kLanes) * kept[j];
  for (int c = 0; c < cells.count; ++c) {
    const float* value = cells.v + c * cells.stride + d;
    if (line < d + N) Fetch(value + cells.count * cells.stride + (line - d));
    Vec weight[NV];
    for (int j = 0; j < NV; ++j) weight[j] = Load(weights + c * kWidth + j * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) sum[i][j] += weight[j] * value[i];
    }
  }
  for (int i = 0; i < N; ++i)
    for (int j = 0; j < NV; ++j) Store(mixed + i * kWidth + j * kLanes, sum[i][j]);
}

// Scores [cell][lane] of cells c ... c + N - 1, those past the last one left alone.
template <int NV, int N>
inline void ScoreLanes(const Cells& cells, const float* q, int64_t dim, int c, float* scores) {
  constexpr int kWidth = NV * kLanes;
  Vec sum[N][NV] = {};
  const float* keys[N];
  for (int i = 0; i < N; ++i)
    keys[i] = cells.k + std::min(c + i, cells.count - 1) * cells.stride;
  for (int i = 0; i < N; ++i)
    for (int64_t d = 0; d < dim; d += kLine)
      Fetch(cells.k + (cells.count + c + i) * cells.stride + d);
  for (int64_t d = 0; d < dim; ++d) {
    Vec column[NV];
    for (int j = 0; j < NV; ++j) column[j] = Load(q + d * kWidth + j * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) sum[i][j] += column[j] * keys[i][d];
    }
  }
  for (int i = 0; i < N && c + i < cells.count; ++i)
    for (int j = 0; j < NV; ++j) Store(scores + (c + i) * kWidth + j * kLanes, sum[i][j]);
}

// One block of cells against NV vectors of rows.
template <int NV>
void VisitLanes(const Problem& p, const Rows& rows, const Cells& cells, const float* q,
                const Sums& state) {
  constexpr int kTile = kRegisterTile<NV>;
  constexpr int kWidth = NV * kLanes;
  const int64_t dim = p.head_dim;
  alignas(64) float scores[kCells * kWidth];
  int c = 0;
  for (; c + kTile <= cells.count; c += kTile) ScoreLanes<NV, kTile>(cells, q, dim, c, scores);
  for (; c < cells.count; c += 4) ScoreLanes<NV, 4>(cells, q, dim, c, scores);
  if (!cells.all_visible) MaskLanes<NV>(p, rows, cells, scores);
  Vec kept[NV];
  for (int j = 0; j < NV; ++j) {
    const Vec before = Load(state.peak + j * kLanes);
    Vec peak = before;
    for (int c = 0; c < cells.count; ++c) peak = Max(peak, Load(scores + c * kWidth + j * kLanes));
    const Vec floor = peak > kMinusInf ? peak : Vec{};
    kept[j] = Exp2(before - floor);
    Vec total = Load(state.total + j * kLanes) * kept[j];
    for (int c = 0; c < cells.count; ++c) {
      float* at = scores + c * kWidth + j * kLanes;
      const Vec weight = Exp2(Load(at) - floor);
      Store(at, weight);
      total += weight;
    }
    Store(state.peak + j * kLanes, peak);
    Store(state.total + j * kLanes, total);
  }
  int64_t d = 0;
  for (; d + kTile <= dim; d += kTile) MixLanes<NV, kTile>(cells, scores, kept, d, state);
  for (; d + 4 <= dim; d += 4) MixLanes<NV, 4>(cells, scores, kept, d, state);
  for (; d < dim; d += 2) MixLanes<NV, 2>(cells, scores, kept, d, state);
}

// One block of cells against R <= kFewRows rows, lanes along d.
template <int R>
void VisitFew(const Problem& p, const Rows& rows, const Cells& cells, const float* q,
              const Sums& state) {
  constexpr int kCellsAtOnce = kLanes / kFewRows;
  const int64_t dim = p.head_dim;
  alignas(64) float scores[kFewCells * kFewRows];  // [cell][row]
  for (int c = 0; c < cells.count; c += kCellsAtOnce) {
    Vec sum[kCellsAtOnce][kFewRows] = {};
    const float* keys[kCellsAtOnce];
    for (int i = 0; i < kCellsAtOnce; ++i)
      keys[i] = cells.k + std::min(c + i, cells.count - 1) * cells.stride;
    for (int64_t d = 0; d < dim; d += kLanes) {
#pragma GCC unroll 4
      for (int i = 0; i < kCellsAtOnce; ++i) {
        const Vec part = Load(keys[i] + d);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[i][r] += Load(q + r * dim + d) * part;
      }
    }
    Store(scores + c * kFewRows, SumEach(sum));
  }
  if (!cells.all_visible) {
    for (int c = 0; c < cells.count; ++c)
      for (int r = 0; r < R; ++r)
        if (!Sees(p, rows, r, cells, c)) scores[c * kFewRows + r] = kMinusInf;
  }
  const int padded = (cells.count + kCellsAtOnce - 1) / kCellsAtOnce * kCellsAtOnce;
  std::fill(scores + cells.count * kFewRows, scores + padded * kFewRows, kMinusInf);
  Vec highest = Load(scores);
  for (int c = kCellsAtOnce; c < padded; c += kCellsAtOnce)
    highest = Max(highest, Load(scores + c * kFewRows));
  float kept[R];
  Vec floors = {};
  for (int r = 0; r < R; ++r) {
    float peak = state.peak[r];
    for (int i = r; i < kLanes; i += kFewRows) peak = std::max(peak, highest[i]);
    const float floor = peak > kMinusInf ? peak : 0.0f;
    for (int i = r; i < kLanes; i += kFewRows) floors[i] = floor;
    kept[r] = state.peak[r] > kMinusInf ? std::exp2(state.peak[r] - floor) : 0.0f;
    state.peak[r] = peak;
  }
  Vec totals = {};
  for (int c = 0; c < padded; c += kCellsAtOnce) {
    const Vec weight = Exp2(Load(scores + c * kFewRows) - floors);
    Store(scores + c * kFewRows, weight);
    totals += weight;
  }
  for (int r = 0; r < R; ++r) {
    float total = 0.0f;
    for (int i = r; i < kLanes; i += kFewRows) total += totals[i];
    state.total[r] = state.total[r] * kept[r] + total;
  }
  constexpr int kWide = 4;  // vectors of d at a time
  for (int64_t d = 0; d < dim; d += kWide * kLanes) {
    const int wide = std::min<int64_t>(kWide, (dim - d) / kLanes);
    Vec sum[R][kWide];
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < wide; ++j)
        sum[r][j] = Load(state.mixed + r * dim + d + j * kLanes) * kept[r];
    if (wide == kWide) {
      for (int c = 0; c < cells.count; ++c) {
        const float* value = cells.v + c * cells.stride + d;
#pragma GCC unroll 4
        for (int j = 0; j < kWide; ++j) {
          const Vec part = Load(value + j * kLanes);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) sum[r][j] += part * scores[c * kFewRows + r];
        }
      }
    } else {
      for (int c = 0; c < cells.count; ++c)
        for (int j = 0; j < wide; ++j)
          for (int r = 0; r < R; ++r)
            sum[r][j] +=
                Load(cells.v + c * cells.stride + d + j * kLanes) * scores[c * kFewRows + r];
    }
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < wide; ++j)
        Store(state.mixed + r * dim + d + j * kLanes, sum[r][j]);
  }
}

using Visit = void (*)(const Problem&, const Rows&, const Cells&, const float*, const Sums&);

Visit VisitorOf(int64_t count) {
  static constexpr Visit kFew[] = {VisitFew<1>, VisitFew<2>, VisitFew<3>, VisitFew<4>};
  static constexpr Visit kMany[] = {VisitLanes<1>, VisitLanes<2>, VisitLanes<3>,
                                    VisitLanes<4>, VisitLanes<5>, VisitLanes<6>};
  if (count <= kFewRows) return kFew[count - 1];
  return kMany[(count + kLanes - 1) / kLanes - 1];
}

// Rows of one head over a share of the context, given as a range of cells counted over all items.
struct Task {
  int64_t head, first, count, begin, end, group;
  bool tail;
};

// How many of a task's rows are visited by lane; the few others follow them.
int64_t RowsByLane(int64_t count) {
  if (count <= kFewRows) return 0;
  const int64_t rest = count % kLanes;
  return count > kLanes && rest <= kFewRows ? count - rest : count;
}

int64_t WholeVectors(int64_t lanes) { return (lanes + kLanes - 1) / kLanes * kLanes; }

// Rows of a task that are visited alike.
struct Part {
  Rows rows;
  Sums sums;
  Visit visit;
  bool by_lane;
  alignas(64) float queries[kMaxDim * kMaxVectors * kLanes];

  void Begin(const Problem& p, const Task& task, int64_t first, int64_t count, State& state) {
    rows.head = task.head;
    rows.first = task.first + first;
    rows.count = count;
    Describe(p, rows);
    visit = VisitorOf(count);
    by_lane = count > kFewRows;
    sums = {state.peak + first, state.total + first, state.mixed + first * p.head_dim};
    const int64_t lanes = by_lane ? WholeVectors(count) : count;
    std::fill_n(sums.peak, lanes, kMinusInf);
    std::fill_n(sums.total, lanes, 0.0f);
    std::fill_n(sums.mixed, lanes * p.head_dim, 0.0f);
  }

  bool Meets(const int32_t* item) const {
    return rows.max_row >= item[kRowBegin] && rows.min_row < item[kRowEnd] &&
           rows.max_block >= item[kBlock] && rows.min_block <= item[kBlock];
  }

  // Whether a cell is outside the window of all rows.
  bool Passed(const Problem& p, int32_t position) const {
    return p.window && rows.min_position - position >= p.window;
  }

  void VisitTail(const Problem& p) {
    LoadQueries(p, rows, -1, by_lane, queries);
    const int64_t block = by_lane ? kCells : kFewCells;
    for (int64_t token = 0; token < p.tokens; token += block) {
      Cells cells;
      cells.stride = p.kv_heads * p.head_dim;
      cells.k = p.k_tail + token * cells.stride + rows.head * p.head_dim;
      cells.v = p.v_tail + token * cells.stride + rows.head * p.head_dim;
      cells.count = std::min(block, p.tokens - token);
      cells.base = 0;
      cells.item = nullptr;
      cells.bias = p.tail_bias + token * p.tail_stride + rows.first;
      cells.all_visible = false;
      visit(p, rows, cells, queries, sums);
    }
  }

  // Cells `begin` to `end` of an item, counted from its first.
  void VisitItem(const Problem& p, const int32_t* item, int64_t begin, int64_t end) {
    const int64_t block = by_lane ? kCells : kFewCells;
    for (int64_t at = begin; at < end; at += block) {
      const int64_t cell = item[kFirst] + at;
      const int64_t flat = rows.head * p.cells + item[kStart] + cell;
      Cells cells;
      cells.stride = p.head_dim;
      cells.k = p.k_cells + flat * p.head_dim;
      cells.v = p.v_cells + flat * p.head_dim;
      cells.count = std::min(block, end - at);
      cells.base = item[kBase] + static_cast<int32_t>(cell);
      // Most of a long context is outside a sliding window, or behind a repair.
      if (cells.base > rows.max_position || Passed(p, cells.base + cells.count - 1)) continue;
      cells.item = item;
      cells.bias = nullptr;
      cells.all_visible = AllVisible(p, rows, item, cells.base + cells.count - 1);
      visit(p, rows, cells, queries, sums);
    }
  }
};

void Run(const Problem& p, const Task& task, State& state) {
  static thread_local Part parts[2];
  int num_parts = 0;
  const int64_t by_lane = RowsByLane(task.count);
  if (by_lane > 0) parts[num_parts++].Begin(p, task, 0, by_lane, state);
  if (by_lane < task.count)
    parts[num_parts++].Begin(p, task, by_lane, task.count - by_lane, state);
  if (task.tail)
    for (int i = 0; i < num_parts; ++i) parts[i].VisitTail(p);
  bool loaded = false;
  int32_t shift = 0;
  int64_t counted = 0;
  for (int32_t index = 0; index < p.num_items && counted < task.end; ++index) {
    const int32_t* item = p.items + index * kColumns;
    const int64_t length = std::max(item[kFill] - item[kFirst], 0);
    const int64_t begin = std::max<int64_t>(task.begin - counted, 0);
    const int64_t end = std::min(task.end - counted, length);
    counted += length;
    bool meets[2] = {};
    for (int i = 0; i < num_parts; ++i) meets[i] = parts[i].Meets(item);
    if (begin >= end || !(meets[0] || meets[1])) continue;
    if (!loaded || item[kShift] != shift) {
      shift = item[kShift];
      loaded = true;
      for (int i = 0; i < num_parts; ++i)
        LoadQueries(p, parts[i].rows, shift ? index : -1, parts[i].by_lane, parts[i].queries);
    }
    for (int64_t at = begin; at < end; at += kCells)  // all parts while the block is in cache
      for (int i = 0; i < num_parts; ++i)
        if (meets[i]) parts[i].VisitItem(p, item, at, std::min(at + kCells, end));
  }
}

// Merge the shares of one group of rows, normalize, and write them out.
void Finish(const Problem& p, const Task& task, const State* shares, int64_t num_shares) {
  const int64_t by_lane = RowsByLane(task.count);
  const int64_t lanes = WholeVectors(by_lane);
  std::vector<float> weight(num_shares);
  for (int64_t i = 0; i < task.count; ++i) {
    float peak = kMinusInf, total = 0.0f;
    for (int64_t s = 0; s < num_shares; ++s) peak = std::max(peak, shares[s].peak[i]);
    for (int64_t s = 0; s < num_shares; ++s) {
      weight[s] = shares[s].peak[i] > kMinusInf ? std::exp2(shares[s].peak[i] - peak) : 0.0f;
      total += weight[s] * shares[s].total[i];
    }
    const int64_t row = task.first + i;
    float* out = p.out + ((row / p.shared) * p.heads + task.head * p.shared + row % p.shared) *
                             p.head_dim;
    for (int64_t d = 0; d < p.head_dim; ++d) {
      float sum = 0.0f;
      for (int64_t s = 0; s < num_shares; ++s)
        if (weight[s] > 0.0f)
          sum += weight[s] * shares[s].mixed[i < by_lane ? d * lanes + i : i * p.head_dim + d];
      out[d] = total > 0.0f ? sum / total : 0.0f;
    }
  }
}

// What threads share; outlives the call in the hands of a thread that came too late.
struct Job {
  Problem problem;
  std::vector<Task> tasks;
  std::vector<std::unique_ptr<std::atomic<int64_t>>> left;  // shares per group
  std::unique_ptr<State[]> states;  // one per task, if groups have several shares
  int64_t num_shares;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};

  void Work() {
    const int64_t count = static_cast<int64_t>(tasks.size());
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      const Task& task = tasks[i];
      if (num_shares == 1) {
        static thread_local State state;
        Run(problem, task, state);
        Finish(problem, task, &state, 1);
      } else {
        Run(problem, task, states[i]);
        if (left[task.group]->fetch_sub(1) == 1)
          Finish(problem, task, &states[task.group * num_shares], num_shares);
      }
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k_tail,
                  ffi::Buffer<ffi::F32> v_tail, ffi::Buffer<ffi::S32> positions,
                  ffi::Buffer<ffi::S32> token_rows, ffi::Buffer<ffi::F32> tail_bias,
                  ffi::Buffer<ffi::F32> k_pages, ffi::Buffer<ffi::F32> v_pages,
                  ffi::Buffer<ffi::S32> items, ffi::Buffer<ffi::S32> count,
                  ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin, int32_t block_tokens,
                  int32_t window, ffi::Result<ffi::Buffer<ffi::F32>> out) {
  auto job = std::make_shared<Job>();
  Problem& p = job->problem;
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
  p.tail_bias = tail_bias.typed_data();
  p.tail_stride = tail_bias.dimensions()[1];
  p.num_items = count.typed_data()[0];
  p.out = out->typed_data();
  if (p.head_dim % kLanes || p.head_dim > kMaxDim)
    return ffi::Error::InvalidArgument("head_dim: expected a multiple of 16 up to 256");

  int64_t context = 0;
  for (int32_t i = 0; i < p.num_items; ++i)
    context += std::max(p.items[i * kColumns + kFill] - p.items[i * kColumns + kFirst], 0);
  // Padding at the end costs nothing: questions are rarely as long as the step's shape.
  const int64_t all_tokens = p.tokens;
  while (p.tokens > 0 && p.token_rows[p.tokens - 1] >= kPaddingRow) --p.tokens;
  std::fill(p.out + p.tokens * p.heads * p.head_dim, p.out + all_tokens * p.heads * p.head_dim,
            0.0f);
  if (p.tokens == 0) return ffi::Error::Success();
  const int64_t rows = p.tokens * p.shared;
  const int64_t widest = kMaxVectors * kLanes;
  const int64_t chunks = (rows + widest - 1) / widest;
  const int64_t per_chunk = (rows + chunks - 1) / chunks;
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  // Enough shares that the threads stay even, none so short that the merge would show.
  const int64_t wanted = (4 * threads + p.kv_heads * chunks - 1) / (p.kv_heads * chunks);
  job->num_shares = std::max<int64_t>(1, std::min(wanted, context / 256));
  for (int64_t head = 0; head < p.kv_heads; ++head) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t group = head * chunks + chunk;
      const int64_t first = chunk * per_chunk;
      for (int64_t share = 0; share < job->num_shares; ++share) {
        const auto edge = [&](int64_t s) {
          return s == job->num_shares ? context : context * s / job->num_shares / kCells * kCells;
        };
        job->tasks.push_back({head, first, std::min(per_chunk, rows - first), edge(share),
                              edge(share + 1), group, share == 0});
      }
      job->left.push_back(std::make_unique<std::atomic<int64_t>>(job->num_shares));
    }
  }
  if (job->num_shares > 1) job->states.reset(new State[job->tasks.size()]);
  const int64_t helpers = std::min<int64_t>(threads, job->tasks.size()) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([job] { job->Work(); });
  job->Work();
  while (job->done.load(std::memory_order_acquire) < static_cast<int64_t>(job->tasks.size()))
    std::this_thread::yield();
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
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<int32_t>("block_tokens")
                                  .Attr<int32_t>("window")
                                  .Ret<ffi::Buffer<ffi::F32>>());
