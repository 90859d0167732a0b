// Pages of the pool copied out and in, for CPUs, as XLA FFI calls.
//
// They are as fast as memory. Stores go around the caches, which would else read every line that is
// about to be overwritten, and are filled with what is not of use before other layers.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <vector>

#if defined(__AVX512F__) || defined(__AVX__)
#include <immintrin.h>
#endif

#include "threads.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kLine = 64;  // bytes

void Copy(char* to, const char* from, int64_t bytes) {
#if defined(__AVX512F__) || defined(__AVX__)
  if (reinterpret_cast<uintptr_t>(to) % kLine == 0 && bytes % kLine == 0) {
    for (int64_t at = 0; at < bytes; at += kLine) {
#if defined(__AVX512F__)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
#else
      for (int64_t half = at; half < at + kLine; half += kLine / 2)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + half),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + half)));
#endif
    }
    _mm_sfence();  // before other threads are told
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

// An array of the pool [heads][num_pages][page], and pages of it [heads][count][page].
struct Array {
  int64_t num_pages;
  int64_t page_bytes;  // of a head
  char* in_pool;
  char* part;
  int64_t first_task;
};

struct Problem {
  std::vector<Array> arrays;
  std::vector<int32_t> pages;
  int64_t num_tasks = 0;

  // A task is a head.
  ffi::Error Add(ffi::AnyBuffer in_pool, ffi::AnyBuffer part) {
    const int64_t heads = in_pool.dimensions()[0], num_pages = in_pool.dimensions()[1];
    for (const int32_t page : pages)
      if (page < 0 || page >= num_pages)
        return ffi::Error::InvalidArgument("pages: expected pages of the pool");
    const int64_t page_bytes = in_pool.size_bytes() / std::max<int64_t>(heads * num_pages, 1);
    arrays.push_back({num_pages, page_bytes, static_cast<char*>(in_pool.untyped_data()),
                      static_cast<char*>(part.untyped_data()), num_tasks});
    num_tasks += heads;
    return ffi::Error::Success();
  }

  // Calls visit(in the pool, in the part, bytes, which of the pages) for every task, on all threads.
  template <typename Visit>
  void Run(ffi::ThreadPool& pool, Visit visit) const {
    const int64_t count = pages.size();
    ShareTasks(pool, num_tasks, [this, count, visit](int64_t task) {
      const auto after = std::upper_bound(
          arrays.begin(), arrays.end(), task,
          [](int64_t task, const Array& one) { return task < one.first_task; });
      const Array& array = *std::prev(after);
      const int64_t head = task - array.first_task;
      for (int64_t index = 0; index < count; ++index) {
        const int64_t page = head * array.num_pages + pages[index];
        visit(array.in_pool + page * array.page_bytes,
              array.part + (head * count + index) * array.page_bytes, array.page_bytes, index);
      }
    });
  }
};

Problem Begin(const ffi::Buffer<ffi::S32>& pages) {
  Problem p;
  p.pages.assign(pages.typed_data(), pages.typed_data() + pages.element_count());
  return p;
}

// Arguments: the arrays of the pool; results: their parts.
ffi::Error Take(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> pages, ffi::RemainingArgs arrays,
                ffi::RemainingRets parts) {
  Problem p = Begin(pages);
  for (size_t i = 0; i < parts.size(); ++i) {
    auto array = arrays.get<ffi::AnyBuffer>(i);
    auto part = parts.get<ffi::AnyBuffer>(i);
    if (array.has_error()) return array.error();
    if (part.has_error()) return part.error();
    if (ffi::Error error = p.Add(*array, **part); error.failure()) return error;
  }
  p.Run(pool, [](const char* in_pool, char* part, int64_t bytes, int64_t) {
    Copy(part, in_pool, bytes);
  });
  return ffi::Error::Success();
}

// Arguments: the arrays of the pool, then their parts; results: the arrays, in place.
ffi::Error Put(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> pages, ffi::RemainingArgs arguments,
               ffi::RemainingRets written) {
  Problem p = Begin(pages);
  for (size_t i = 0; i < written.size(); ++i) {
    auto array = arguments.get<ffi::AnyBuffer>(i);
    auto part = arguments.get<ffi::AnyBuffer>(written.size() + i);
    auto result = written.get<ffi::AnyBuffer>(i);
    if (array.has_error()) return array.error();
    if (part.has_error()) return part.error();
    if (result.has_error()) return result.error();
    if ((**result).untyped_data() != array->untyped_data())
      return ffi::Error::Internal("expected the results to be the arrays that came in");
    if (ffi::Error error = p.Add(*array, *part); error.failure()) return error;
  }
  p.Run(pool, [&p](char* in_pool, const char* part, int64_t bytes, int64_t index) {
    if (index && p.pages[index] == p.pages[index - 1]) return;  // the same page again, as before
    Copy(in_pool, part, bytes);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxstateTakePages, Take,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxstatePutPages, Put,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets());
