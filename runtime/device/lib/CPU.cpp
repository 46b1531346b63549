//===- CPU.cpp - Run-time library for the CPU -----------------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Device/CPU.h"
#include "corey/Device/RuntimeABI.h"
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <omp.h>

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

/// The class of a size, and the size every block of that class has.
static unsigned classOf(size_t size, size_t &rounded) {
  size = std::max<size_t>(size, 256);
  unsigned log = 63 - __builtin_clzll(size - 1);
  size_t quarter = size_t(1) << (log - 2);
  // In (2^log, 2^(log+1)]: rounded up to quarters of 2^log.
  size_t steps = (size - (size_t(1) << log) + quarter - 1) / quarter;
  rounded = (size_t(1) << log) + steps * quarter;
  return 4 * log + static_cast<unsigned>(steps) - 1;
}

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
  unsigned sizeClass = classOf(size, rounded);
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

static thread_local CallState *currentCall = nullptr;

/// State for programs that were compiled ahead of time and run without a
/// CallScope.
static CallState &defaultCall() {
  static thread_local CallState state;
  return state;
}

static CallState &call() { return currentCall ? *currentCall : defaultCall(); }

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
  CallState *previous = currentCall;
  int previousThreads = omp_get_max_threads();
  currentCall = &state;
  state.missingBytes = 0;
  omp_set_num_threads(threads);
  bool finished = runGuarded(state, function, arguments);
  currentCall = previous;
  omp_set_num_threads(previousThreads);
  return finished;
}

int corey::device::hardwareThreads() { return omp_get_num_procs(); }

static void fail(std::string message) {
  CallState &state = call();
  if (!currentCall) {
    // Nobody will ask: an ahead-of-time program has no other way to be told.
    std::fprintf(stderr, "corey: error: %s\n", message.c_str());
    return;
  }
  if (state.error.empty())
    state.error = std::move(message);
}

void SiteStatistics::add(double value) {
  if (!std::isfinite(value)) {
    ++nonFinite;
    return;
  }
  min = count ? std::min(min, value) : value;
  max = count ? std::max(max, value) : value;
  ++count;
  double delta = value - mean;
  mean += delta / static_cast<double>(count);
  m2 += delta * (value - mean);
}

//===----------------------------------------------------------------------===//
// ABI
//===----------------------------------------------------------------------===//

void *corey_rt_malloc(size_t size) {
  CallState &state = call();
  void *pointer = state.arena.allocate(size);
  if (pointer)
    return pointer;
  // Compiled code cannot go on without its buffers. Between parallel loops the
  // call can be left; inside one, or without a caller to tell, it cannot.
  if (currentCall && !omp_in_parallel()) {
    state.missingBytes = size;
    std::longjmp(state.outOfMemory, 1);
  }
  std::fprintf(stderr, "corey: fatal: out of memory allocating %zu bytes\n",
               size);
  std::abort();
}

void corey_rt_free(void *pointer) { call().arena.release(pointer); }

int64_t corey_rt_chunk(int64_t site, int64_t batch, int64_t length,
                       int64_t fallback) {
  ProgramState *program = call().program;
  if (fallback <= 0 && program)
    fallback = program->defaultChunk;
  int64_t chunk = fallback > 0 ? fallback : std::max<int64_t>(length, 1);
  if (!program)
    return chunk;
  const char *name = reinterpret_cast<const char *>(site);
  for (auto &entry : program->chunks) {
    if (entry->name != name)
      continue;
    int64_t requested = entry->requested.load(std::memory_order_relaxed);
    if (requested > 0)
      chunk = requested;
    entry->lastRequested.store(requested > 0, std::memory_order_relaxed);
    entry->lastBatch.store(batch, std::memory_order_relaxed);
    entry->lastLength.store(length, std::memory_order_relaxed);
    entry->lastChunk.store(chunk, std::memory_order_relaxed);
    break;
  }
  return chunk;
}

static double widen(const void *address, int64_t index, int64_t width) {
  if (width == 32)
    return static_cast<const float *>(address)[index];
  uint16_t bits = static_cast<const uint16_t *>(address)[index];
  if (width < 0) {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  double sign = bits >> 15 ? -1.0 : 1.0;
  if (exponent == 31)
    return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0)
    return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(mantissa + 1024, exponent - 25);
}

void corey_rt_observe(int64_t site, int64_t address, int64_t count,
                      int64_t width) {
  ProgramState *program = call().program;
  if (!program)
    return;
  const char *name = reinterpret_cast<const char *>(site);
  std::lock_guard<std::mutex> lock(program->statisticsMutex);
  auto it =
      std::find_if(program->statistics.begin(), program->statistics.end(),
                   [&](const SiteStatistics &s) { return s.name == name; });
  if (it == program->statistics.end()) {
    program->statistics.emplace_back();
    it = program->statistics.end() - 1;
    it->name = name;
  }
  for (int64_t i = 0; i < count; ++i)
    it->add(widen(reinterpret_cast<const void *>(address), i, width));
}

void corey_rt_bad_index(int64_t index, int64_t limit) {
  fail("expected ids of an embedding to be in [0, " + std::to_string(limit) +
       "), got " + std::to_string(index));
}

void corey_rt_check_sequence_count(int64_t count, int64_t length) {
  if (count == 0 && length > 0)
    fail("expected seq_starts to have a sequence for " +
         std::to_string(length) + " tokens, got none");
}

void corey_rt_check_sequence_start(int64_t sequence, int64_t start,
                                   int64_t previous, int64_t length) {
  if (sequence == 0 && start != 0)
    fail("expected seq_starts[0] to be 0, got " + std::to_string(start));
  else if (start < previous || start > length)
    fail("expected seq_starts[" + std::to_string(sequence) + "] to be in [" +
         std::to_string(previous) + ", " + std::to_string(length) + "], got " +
         std::to_string(start));
}
