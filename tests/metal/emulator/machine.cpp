// An emulated GPU: runs a compiled kernel, threadgroup by threadgroup, each thread of a threadgroup as a fibre.
//   program FOLDER ORDER GUARD GRID(3) GROUP(3)      buffers are FOLDER/0, FOLDER/1, ...; outputs are written back
// Prints the bytes of threadgroup memory, the exchanges and the barriers. A mistake of the kernel ends the program
// with a line on stderr. Memory that nobody has written is NaN; buffers end (or begin) at memory that faults.
#include "machine.h"

#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <random>
#include <string>
#include <vector>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

extern "C" unsigned char __start_threadgroup_memory[] __attribute__((weak));
extern "C" unsigned char __stop_threadgroup_memory[] __attribute__((weak));

namespace machine {

Place group, group_start, group_size, groups, grid;

namespace {

constexpr size_t STACK = 256 << 10, PAGE = 4096, WIDEST = 16, GUARD = 64 << 20;
enum Order { FORWARD, BACKWARD, RANDOM };

struct Simdgroup {
  unsigned arrived, alive, generation;
  unsigned char values[2][SIMD][WIDEST];  // of this exchange and the one before, which slow threads still read
  const void* sites[2][SIMD];
};
struct Fibre {
  ucontext_t first;
  jmp_buf resume;
  bool started, done;
  unsigned index;
  Place position;
  unsigned char* stack;
};
std::vector<Fibre> fibres;
std::vector<Simdgroup> simdgroups;
Fibre* running;
unsigned alive, at_barrier, barrier_generation;
const void* barrier_site;
jmp_buf scheduler;
unsigned long exchanges, barriers, progress;
std::vector<unsigned char*> buffers;

[[noreturn]] void fail(const char* what) {
  fprintf(stderr, "emulator: %s (threadgroup %u %u %u, thread %u)\n", what, group.x, group.y, group.z,
          running ? running->index : 0);
  fflush(stderr);
  _exit(3);
}

void report_signal(int number, siginfo_t* info, void*) {
  const bool fault = number == SIGSEGV || number == SIGBUS;
  if (fault && info->si_code == SI_KERNEL) fail("a misaligned vector");
  fail(fault ? "memory outside of a buffer" : "undefined behaviour: misaligned, out of bounds, or an overflow");
}

void catch_signals() {
  static unsigned char stack[64 << 10];
  stack_t own = {};
  own.ss_sp = stack;
  own.ss_size = sizeof(stack);
  sigaltstack(&own, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = report_signal;
  action.sa_flags = SA_ONSTACK | SA_SIGINFO;
  for (int number : {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE}) sigaction(number, &action, nullptr);
}

void pause() {
  if (!_setjmp(running->resume)) _longjmp(scheduler, 1);
}

void run_fibre() {
  kernel_thread(buffers.data(), running->position);
  running->done = true;
  --alive;
  ++progress;
  Simdgroup& simd = simdgroups[running->index / SIMD];
  --simd.alive;
  if (simd.arrived) fail("a thread has returned while its simdgroup exchanges");
  if (at_barrier) fail("a thread has returned while others wait at a barrier");
  _longjmp(scheduler, 1);
}

void resume(Fibre& fibre) {
  running = &fibre;
  if (_setjmp(scheduler)) return;
  if (fibre.started) _longjmp(fibre.resume, 1);
  fibre.started = true;
  getcontext(&fibre.first);
  fibre.first.uc_stack.ss_sp = fibre.stack;
  fibre.first.uc_stack.ss_size = STACK;
  makecontext(&fibre.first, run_fibre, 0);
  setcontext(&fibre.first);
}

unsigned char* map(size_t size, int access = PROT_READ | PROT_WRITE) {
  void* found = mmap(nullptr, size, access, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) fail("no memory");
  return static_cast<unsigned char*>(found);
}

void make_fibres(unsigned count) {
  for (size_t i = count; i < fibres.size(); i++) munmap(fibres[i].stack, STACK);
  const size_t had = fibres.size();
  fibres.resize(count);
  for (size_t i = had; i < count; i++) fibres[i].stack = map(STACK);
  simdgroups.assign((count + SIMD - 1) / SIMD, {});
  for (unsigned i = 0; i < count; i++) {
    Fibre& fibre = fibres[i];
    fibre.started = fibre.done = false;
    fibre.index = i;
    fibre.position = {i % group_size.x, i / group_size.x % group_size.y, i / (group_size.x * group_size.y)};
    simdgroups[i / SIMD].alive++;
  }
  alive = count;
  at_barrier = 0;
}

unsigned long count_generations() {
  unsigned long sum = barrier_generation;
  for (const Simdgroup& simd : simdgroups) sum += simd.generation;
  return sum + progress;
}

void run_group(Order order, std::mt19937& random) {
  const unsigned count = group_size.x * group_size.y * group_size.z;
  make_fibres(count);
  if (__start_threadgroup_memory)  // absent where a kernel has none
    memset(__start_threadgroup_memory, 0xff, __stop_threadgroup_memory - __start_threadgroup_memory);
  std::vector<unsigned> turns(count);
  for (unsigned i = 0; i < count; i++) turns[i] = order == BACKWARD ? count - 1 - i : i;
  while (alive) {
    if (order == RANDOM) std::shuffle(turns.begin(), turns.end(), random);
    const unsigned long before = count_generations();
    for (unsigned i : turns)
      if (!fibres[i].done) resume(fibres[i]);
    if (alive && count_generations() == before) fail("deadlock: threads wait for others that do not come");
  }
  running = nullptr;
}

unsigned char* make_buffer(size_t size, bool guard_end) {
  const size_t whole = (size + PAGE - 1) / PAGE * PAGE;
  unsigned char* start = map(GUARD + whole + GUARD, PROT_NONE) + GUARD;
  mprotect(start, whole, PROT_READ | PROT_WRITE);
  return start + (guard_end ? (whole - size) / 16 * 16 : 0);  // Metal's buffers are aligned to 16 at least
}

size_t load_buffer(const std::string& path, bool guard_end, bool output) {
  FILE* file = fopen(path.c_str(), "rb");
  if (!file) fail("a buffer's file is missing");
  fseek(file, 0, SEEK_END);
  const size_t size = ftell(file);
  rewind(file);
  unsigned char* data = make_buffer(size, guard_end);
  if (fread(data, 1, size, file) != size) fail("a buffer's file cannot be read");
  fclose(file);
  const size_t lead = uintptr_t(data) % PAGE;
  if (output) memset(data, 0xff, size);
  else mprotect(data - lead, size + lead, PROT_READ);
  buffers.push_back(data);
  return size;
}

void run_grid(Order order) {  // as Metal's dispatchThreads: the last threadgroups are smaller
  const Place most = {std::min(group_size.x, grid.x), std::min(group_size.y, grid.y), std::min(group_size.z, grid.z)};
  groups = {(grid.x + most.x - 1) / most.x, (grid.y + most.y - 1) / most.y, (grid.z + most.z - 1) / most.z};
  std::mt19937 random(7);
  for (unsigned z = 0; z < groups.z; z++)
    for (unsigned y = 0; y < groups.y; y++)
      for (unsigned x = 0; x < groups.x; x++) {
        group = {x, y, z};
        group_start = {x * most.x, y * most.y, z * most.z};
        group_size = {std::min(most.x, grid.x - group_start.x), std::min(most.y, grid.y - group_start.y),
                      std::min(most.z, grid.z - group_start.z)};
        run_group(order, random);
      }
}

}  // namespace

unsigned thread_index() { return running->index; }

void exchange(void* value, unsigned size, unsigned partner, const void* site) {
  if (size > WIDEST) fail("an exchange of more than 16 bytes");
  const unsigned lane = running->index % SIMD;
  Simdgroup& simd = simdgroups[running->index / SIMD];
  const unsigned own = simd.generation, half = own % 2;
  memcpy(simd.values[half][lane], value, size);
  simd.sites[half][lane] = site;
  ++exchanges;
  ++progress;
  if (++simd.arrived == simd.alive) {
    simd.arrived = 0;
    ++simd.generation;
    memset(simd.sites[1 - half], 0, sizeof(simd.sites[0]));  // all have read it; who has returned gives no more
  }
  while (simd.generation == own) pause();
  if (simd.sites[half][partner] != site) fail("threads of a simdgroup exchange at different places");
  memcpy(value, simd.values[half][partner], size);
}

void wait_at_barrier(const void* site) {
  if (alive != fibres.size()) fail("a barrier after a thread has returned");
  if (at_barrier == 0) barrier_site = site;
  if (barrier_site != site) fail("threads wait at different barriers");
  const unsigned own = barrier_generation;
  ++barriers;
  ++progress;
  if (++at_barrier == alive) {
    at_barrier = 0;
    ++barrier_generation;
  }
  while (barrier_generation == own) pause();
}

}  // namespace machine

int main(int, char** arguments) {
  using namespace machine;
  catch_signals();
  const std::string folder = arguments[1];
  unsigned* numbers[] = {&grid.x, &grid.y, &grid.z, &group_size.x, &group_size.y, &group_size.z};
  for (int i = 0; i < 6; i++) *numbers[i] = atoi(arguments[4 + i]);
  std::vector<size_t> sizes;
  for (unsigned i = 0; i < kernel_buffers; i++)
    sizes.push_back(load_buffer(folder + "/" + std::to_string(i), atoi(arguments[3]), kernel_writes[i]));
  run_grid(Order(atoi(arguments[2])));
  for (unsigned i = 0; i < kernel_buffers; i++) {
    if (!kernel_writes[i]) continue;
    FILE* file = fopen((folder + "/" + std::to_string(i)).c_str(), "wb");
    if (!file || fwrite(buffers[i], 1, sizes[i], file) != sizes[i] || fclose(file)) fail("an output cannot be written");
  }
  printf("%zu %lu %lu\n", size_t(__stop_threadgroup_memory - __start_threadgroup_memory), exchanges, barriers);
}
