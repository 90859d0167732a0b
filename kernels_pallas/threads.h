// Tasks shared by the threads of XLA's pool, for kernels on CPUs.

#ifndef JAXSTATE_KERNELS_THREADS_H_
#define JAXSTATE_KERNELS_THREADS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace {

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t NumThreads(xla::ffi::ThreadPool& pool) {
  return std::max<int64_t>(pool.num_threads(), 1);
}

// What threads share; outlives the call in the hands of a thread that came too late.
template <typename Run>
struct Job {
  Run run;
  int64_t num_tasks;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};

  Job(Run run, int64_t num_tasks) : run(run), num_tasks(num_tasks) {}

  void Work() {
    for (int64_t i = next.fetch_add(1); i < num_tasks; i = next.fetch_add(1)) {
      run(i);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

// Call run(0) ... run(num_tasks - 1) on this thread and the pool's; returns when all are done.
template <typename Run>
void ShareTasks(xla::ffi::ThreadPool& pool, int64_t num_tasks, Run run) {
  auto job = std::make_shared<Job<Run>>(run, num_tasks);
  const int64_t helpers = std::min(NumThreads(pool), num_tasks) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([job] { job->Work(); });
  job->Work();
  while (job->done.load(std::memory_order_acquire) < num_tasks) std::this_thread::yield();
}

}  // namespace

#endif  // JAXSTATE_KERNELS_THREADS_H_
