//===- CPU.cpp - Run-time library for the CPU -----------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Device/CPU.h"
#include "SizeClass.h"
#include "corey/Device/RuntimeABI.h"
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <omp.h>

using namespace corey;
using namespace corey::device;

//===----------------------------------------------------------------------===//
// Arena
//===----------------------------------------------------------------------===//

/// Stands before every block, in 64 bytes so that the block stays aligned.
struct Arena::Header {
  /// The next free block of the class.
  Header *next;
  /// The next block of the arena.
  Header *nextBlock;
  unsigned sizeClass;
  bool inUse;
};
static constexpr size_t kAlignment = 64;

Arena::~Arena() {
  while (blocks) {
    Header *next = blocks->nextBlock;
    std::free(blocks);
    blocks = next;
  }
}

void *Arena::allocate(size_t size) {
  static_assert(sizeof(Header) <= kAlignment, "blocks must stay aligned");
  if (size > (size_t(1) << 46))
    return nullptr;
  size_t rounded;
  unsigned sizeClass = sizeClassOf(size, rounded);
  Header *block = lists[sizeClass];
  if (block) {
    lists[sizeClass] = block->next;
  } else {
    block = static_cast<Header *>(std::aligned_alloc(
        kAlignment,
        kAlignment + (rounded + kAlignment - 1) / kAlignment * kAlignment));
    if (!block)
      return nullptr;
    block->sizeClass = sizeClass;
    block->nextBlock = blocks;
    blocks = block;
    reserved += kAlignment + rounded;
    ++requests;
  }
  block->inUse = true;
  return reinterpret_cast<char *>(block) + kAlignment;
}

void Arena::release(void *pointer) {
  if (!pointer)
    return;
  auto *block =
      reinterpret_cast<Header *>(static_cast<char *>(pointer) - kAlignment);
  block->inUse = false;
  block->next = lists[block->sizeClass];
  lists[block->sizeClass] = block;
}

void Arena::releaseAll() {
  for (Header *block = blocks; block; block = block->nextBlock)
    if (block->inUse)
      release(reinterpret_cast<char *>(block) + kAlignment);
}

//===----------------------------------------------------------------------===//
// Calls
//===----------------------------------------------------------------------===//

static thread_local CallState *current = nullptr;

CallState *corey::device::currentCall() { return current; }

/// State for programs that were compiled ahead of time and run without a
/// CallScope.
static CallState &defaultCall() {
  static thread_local CallState state;
  return state;
}

CallState &corey::device::callOrDefault() {
  return current ? *current : defaultCall();
}

/// Runs `function`; a longjmp to state.outOfMemory leaves compiled code, which
/// has nothing to unwind.
static bool runGuarded(CallState &state, void (*function)(void **),
                       void **arguments) {
  if (setjmp(state.outOfMemory))
    return false;
  function(arguments);
  return true;
}

bool corey::device::invoke(CallState &state, int threads,
                           void (*function)(void **), void **arguments) {
  CallState *previous = current;
  int previousThreads = omp_get_max_threads();
  current = &state;
  state.missingBytes = 0;
  state.threads = threads;
  state.seen.clear();
  std::fill(state.variants.begin(), state.variants.end(), 0);
  omp_set_num_threads(threads);
  bool finished = runGuarded(state, function, arguments);
  current = previous;
  omp_set_num_threads(previousThreads);
  if (finished)
    for (const CallState::Seen &seen : state.seen)
      state.program->observations[seen.observation]->publish(seen.statistics,
                                                             seen.milliseconds);
  return finished;
}

int corey::device::hardwareThreads() { return omp_get_num_procs(); }

void corey::device::failCall(Status error) {
  if (!current) {
    // Nobody will ask: an ahead-of-time program has no other way to be told.
    std::fprintf(stderr, "corey: error: %s\n", error.message().c_str());
    return;
  }
  if (current->error)
    current->error = std::move(error);
}

static void fail(std::string message) {
  failCall(Status::invalidArgument(std::move(message)));
}

Status corey::device::indexError(int64_t index, int64_t limit) {
  return Status::invalidArgument("expected ids of an embedding to be in [0, " +
                                 std::to_string(limit) + "), got " +
                                 std::to_string(index));
}

Status corey::device::slotError(int64_t slot, int64_t limit) {
  return Status::invalidArgument(
      "expected a slot below " + std::to_string(limit) +
      ", the states of the pool, got " + std::to_string(slot));
}

Status corey::device::sequenceStartError(int64_t sequence, int64_t start,
                                         int64_t previous, int64_t length) {
  if (sequence == 0 && start != 0)
    return Status::invalidArgument("expected seq_starts[0] to be 0, got " +
                                   std::to_string(start));
  if (start < previous || start > length)
    return Status::invalidArgument(
        "expected seq_starts[" + std::to_string(sequence) + "] to be in [" +
        std::to_string(previous) + ", " + std::to_string(length) + "], got " +
        std::to_string(start));
  return Status::ok();
}

void corey::device::leaveOutOfMemory(size_t size) {
  // Compiled code cannot go on without its buffers. Between parallel loops the
  // call can be left; inside one, or without a caller to tell, it cannot.
  if (current && !omp_in_parallel()) {
    current->missingBytes = size;
    std::longjmp(current->outOfMemory, 1);
  }
  std::fprintf(stderr, "corey: fatal: out of memory allocating %zu bytes\n",
               size);
  std::abort();
}

//===----------------------------------------------------------------------===//
// Sites
//===----------------------------------------------------------------------===//

void ProgramState::addChunk(std::unique_ptr<scheduler::Site> site) {
  chunkIndex[site->info().name] = chunks.size();
  chunks.push_back(std::move(site));
}

void ProgramState::addObservation(std::unique_ptr<ObservationSite> site) {
  observationIndex[site->name] = observations.size();
  observations.push_back(std::move(site));
}

int64_t ProgramState::findChunkIndex(std::string_view name) const {
  auto it = chunkIndex.find(name);
  return it == chunkIndex.end() ? -1 : static_cast<int64_t>(it->second);
}

scheduler::Site *ProgramState::findChunk(std::string_view name) const {
  int64_t index = findChunkIndex(name);
  return index < 0 ? nullptr : chunks[index].get();
}

void ObservationSite::publish(const scheduler::Statistics &s, double ms) {
  if (target)
    target->publish(s, ms);
  std::lock_guard<std::mutex> lock(mutex);
  ++calls;
  last = s;
  lastMs = ms;
  if (s.usable())
    entropy.update(s.entropy.value());
  nonFinite += s.nonFinite();
  if (!s.count)
    return;
  min = count ? std::min(min, s.min) : s.min;
  max = count ? std::max(max, s.max) : s.max;
  // Chan's update of two sets.
  double n = static_cast<double>(count), k = static_cast<double>(s.count);
  double delta = s.mean - mean;
  mean += delta * (k / (n + k));
  m2 += s.variance * k + delta * delta * (n * k / (n + k));
  count += s.count;
}

//===----------------------------------------------------------------------===//
// ABI
//===----------------------------------------------------------------------===//

void *corey_rt_malloc(size_t size) {
  void *pointer = callOrDefault().arena.allocate(size);
  if (!pointer)
    leaveOutOfMemory(size);
  return pointer;
}

void corey_rt_free(void *pointer) { callOrDefault().arena.release(pointer); }

int64_t corey_rt_chunk(int64_t site, int64_t batch, int64_t length,
                       int64_t fallback) {
  CallState &state = callOrDefault();
  int64_t index =
      state.program
          ? state.program->findChunkIndex(reinterpret_cast<const char *>(site))
          : -1;
  if (index < 0)
    return fallback > 0 ? fallback : std::max<int64_t>(length, 1);
  // On a CUDA device the site's own units hold: its multiprocessors.
  int64_t units = state.cuda ? 0 : state.threads;
  scheduler::Site &asked = *state.program->chunks[index];
  scheduler::Decision decision = asked.decide(batch, length, units);
  if (state.decided)
    state.decided->push_back({&asked, batch, length, units, decision});
  state.variants.resize(state.program->chunks.size());
  state.variants[index] = static_cast<int>(decision.variant);
  return std::max<int64_t>(decision.chunk, 1);
}

int64_t corey_rt_variant(int64_t site) {
  CallState &state = callOrDefault();
  int64_t index =
      state.program
          ? state.program->findChunkIndex(reinterpret_cast<const char *>(site))
          : -1;
  return index >= 0 && static_cast<size_t>(index) < state.variants.size()
             ? state.variants[index]
             : 0;
}

void corey_rt_observe(int64_t site, int64_t address, int64_t layout,
                      int64_t rank, int64_t width) {
  CallState &state = callOrDefault();
  if (!state.program)
    return;
  auto it = state.program->observationIndex.find(
      reinterpret_cast<const char *>(site));
  if (it == state.program->observationIndex.end())
    return;
  ObservationSite &observation = *state.program->observations[it->second];
  state.estimators.resize(state.program->observations.size());
  std::unique_ptr<scheduler::Estimator> &estimator =
      state.estimators[it->second];
  if (!estimator) {
    Expected<scheduler::Estimator> made =
        scheduler::Estimator::create(observation.options);
    if (!made)
      return fail(made.status().message());
    estimator = std::make_unique<scheduler::Estimator>(std::move(*made));
  }
  if (observation.target &&
      !estimator->wantsLayer(observation.target->info().layer))
    return;
  scheduler::TensorView view;
  view.data = reinterpret_cast<const void *>(address);
  view.type = width == 32   ? scheduler::ElementType::F32
              : width == 16 ? scheduler::ElementType::F16
                            : scheduler::ElementType::BF16;
  view.rank = static_cast<int>(rank);
  const int64_t *sizes = reinterpret_cast<const int64_t *>(layout);
  std::copy(sizes, sizes + rank, view.shape);
  std::copy(sizes + rank, sizes + 2 * rank, view.strides);
  auto start = std::chrono::steady_clock::now();
  Expected<scheduler::Statistics> statistics = estimator->estimate(view);
  if (!statistics)
    return fail("site '" + observation.name +
                "': " + statistics.status().message());
  state.seen.push_back({it->second, *statistics,
                        std::chrono::duration<double, std::milli>(
                            std::chrono::steady_clock::now() - start)
                            .count()});
}

void corey_rt_bad_index(int64_t index, int64_t limit) {
  failCall(indexError(index, limit));
}

void corey_rt_bad_slot(int64_t slot, int64_t limit) {
  failCall(slotError(slot, limit));
}

void corey_rt_check_sequence_count(int64_t count, int64_t length) {
  if (count == 0 && length > 0)
    fail("expected seq_starts to have a sequence for " +
         std::to_string(length) + " tokens, got none");
}

void corey_rt_check_sequence_start(int64_t sequence, int64_t start,
                                   int64_t previous, int64_t length) {
  if (Status status = sequenceStartError(sequence, start, previous, length);
      !status)
    failCall(std::move(status));
}
