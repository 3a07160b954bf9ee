// The emulator's runtime: runs one threadgroup after the other, every thread of it as a fiber on one thread of the CPU.
//
// A fiber runs until it meets a barrier or a simdgroup operation, and then waits until the others it needs are there:
// those of its simdgroup, or of its threadgroup. So barriers and simdgroup operations have their true meaning, and what
// a kernel does between them is run in an order that Metal might have chosen as well.
//
// Kernels built for checking call back before every access to memory that others can see. clang's ThreadSanitizer emits
// these calls, and this file implements them instead of its library: bounds, races, reads of what nobody wrote. Races
// are found by order, not by luck: two accesses to one element by two threads, one of them a write, must have a barrier
// for that memory between them. Checks of clang's UndefinedBehaviorSanitizer end here too.
#include "runtime.h"

extern "C" {
void* calloc(unsigned long count, unsigned long size);
void free(void* memory);
int strcmp(const char* a, const char* b);

struct Buffer {  // an argument of the kernel
  const char* name;
  char* data;
  unsigned long size, element_size;  // bytes
  bool is_output, is_initialised;
};

struct Problem {
  const char *kind, *what, *name;  // the check, the access or operation, the array
  long element, num_elements;
  int thread, other_thread;  // index in the threadgroup, or one of the values below
  uint threadgroup[3];
  int line, other_line;             // in the kernel's text, 0 where a program counter says more
  unsigned long pc, other_pc;       // offsets in the kernel's library
};
enum { NOBODY = -1, SEVERAL = -2, ANOTHER_THREADGROUP = -3 };

struct Launch {
  void (*kernel)(void** arguments);
  void** arguments;
  Buffer* buffers;
  uint num_buffers, grid[3], threadgroup[3], seed;
  bool is_checked;
  const char *image_begin, *image_end;  // where the kernel's library lies
  Problem* problems;
  uint max_problems, num_problems;
  unsigned long threadgroup_bytes;  // of threadgroup memory
};

const EmulatorThread* emulator_thread;
}

namespace {

constexpr uint MAX_THREADS = 1024, MAX_ARRAYS = 64;
constexpr unsigned long STACK_BYTES = 128 << 10, ARENA_BYTES = 1 << 20, RED_ZONE = 256;
constexpr unsigned long MAX_ACCESSES = 1ul << 24;  // of one thread between two waits
enum Memory { DEVICE, THREADGROUP };  // bit number in the flags of a barrier

Launch* launch;
bool is_aborted;

// ---- problems

[[noreturn]] void abort_launch();

unsigned long image_offset(const void* return_address) {
  return return_address ? (const char*)return_address - launch->image_begin - 1 : 0;
}

// Records a problem, once for each place and kind; what cannot be continued ends the launch.
void report(Problem problem, bool is_fatal = false) {
  const EmulatorThread* thread = emulator_thread;
  problem.thread = thread ? (int)thread->thread_index_in_threadgroup : NOBODY;
  for (int d = 0; d < 3; d++) problem.threadgroup[d] = thread ? thread->threadgroup_position_in_grid[d] : 0;
  bool is_known = false;
  for (uint i = 0; i < launch->num_problems; i++) {
    const Problem& known = launch->problems[i];
    is_known |= !strcmp(known.kind, problem.kind) && known.pc == problem.pc && known.line == problem.line &&
                known.other_pc == problem.other_pc && known.other_line == problem.other_line &&
                !strcmp(known.name, problem.name);
  }
  if (!is_known && launch->num_problems < launch->max_problems) launch->problems[launch->num_problems++] = problem;
  if (is_fatal) abort_launch();
}

// ---- fibers

enum State { READY, AT_SIMD_OPERATION, AT_SIMDGROUP_BARRIER, AT_THREADGROUP_BARRIER, DONE };

struct Fiber {
  EmulatorThread thread;
  void* stack_pointer;
  State state;
  // where it waits, and for what
  const char* operation;
  int line, flags;
  uint argument;
  EmulatorCombine combine;
};

struct Simdgroup {
  uint epoch[2];  // barriers passed since the last threadgroup_barrier, by memory
  char values[SIMD_WIDTH * SLOT_BYTES], results[SIMD_WIDTH * SLOT_BYTES];
  uint arguments[SIMD_WIDTH];
};

Fiber fibers[MAX_THREADS];
Simdgroup simdgroups[MAX_THREADS / SIMD_WIDTH];
uint num_threads, num_simdgroups;  // of the threadgroup that runs
uint epoch[2];                     // threadgroup_barriers passed by this threadgroup, by memory
uint threadgroup_serial;           // counts threadgroups from 1
char* stacks;
void* scheduler_stack_pointer;
Fiber* running;
unsigned long num_accesses;  // since it was resumed

// Saves the registers that a function must keep, and its stack pointer in *save; goes on where `load` was saved.
extern "C" void emulator_switch(void** save, void* load);
#if defined(__x86_64__)
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
constexpr uint SAVED_WORDS = 8, RETURN_WORD = 6;  // six registers, the return address, and a word for alignment
#elif defined(__aarch64__)
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch, %function
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
constexpr uint SAVED_WORDS = 20, RETURN_WORD = 11;  // x30
#else
#error "fibers are written for x86-64 and arm64"
#endif

void yield_to_scheduler() { emulator_switch(&running->stack_pointer, scheduler_stack_pointer); }

void abort_launch() {
  is_aborted = true;
  yield_to_scheduler();
  __builtin_unreachable();  // an aborted launch resumes no fiber
}

void fiber_main() {
  launch->kernel(launch->arguments);
  running->state = DONE;
  yield_to_scheduler();
}

void resume(Fiber& fiber) {
  running = &fiber;
  num_accesses = 0;
  emulator_thread = &fiber.thread;
  emulator_switch(&scheduler_stack_pointer, fiber.stack_pointer);
  running = nullptr;
  emulator_thread = nullptr;
}

char* stack_of(const Fiber& fiber) { return stacks + (&fiber - fibers) * STACK_BYTES; }

void start_fiber(Fiber& fiber) {
  void** frame = (void**)(stack_of(fiber) + STACK_BYTES) - SAVED_WORDS;
  for (uint i = 0; i < SAVED_WORDS; i++) frame[i] = nullptr;
  frame[RETURN_WORD] = (void*)fiber_main;
  fiber.stack_pointer = frame;
  fiber.state = READY;
}

// ---- checked memory

// The last write of an element, and the reads since. Of several readers in one epoch it is kept that they are several.
struct Shadow {
  uint write_serial, write_epoch, write_simd_epoch;  // a serial of 0: never
  uint read_serial, read_epoch, read_simd_epoch;
  short writer, reader, reader_simdgroup;  // indices in the threadgroup, or SEVERAL
  unsigned long write_pc, read_pc;
};

struct ThreadgroupArray {
  const char* name;
  int line;
  char* data;
  unsigned long size, element_size;
  Shadow* shadow;
};

alignas(64) char arena[ARENA_BYTES];
unsigned long arena_used;
ThreadgroupArray arrays[MAX_ARRAYS];
uint num_arrays;
Shadow** buffer_shadows;  // one a buffer; null for inputs, which nobody writes

struct Access {
  unsigned long size;
  bool reads, writes;
  unsigned long pc;
  const char* what() const { return writes ? "write" : "read"; }
};

// Whether an access by thread `other` at that epoch has no barrier between it and what the running thread does now.
bool is_concurrent(Memory memory, int other, int other_simdgroup, uint other_epoch, uint other_simd_epoch) {
  const EmulatorThread& me = running->thread;
  if (other == (int)me.thread_index_in_threadgroup || other_epoch != epoch[memory]) return false;
  if (other_simdgroup != (int)me.simdgroup_index_in_threadgroup) return true;
  return other_simd_epoch == simdgroups[other_simdgroup].epoch[memory];
}

void check_element(Shadow& shadow, Access access, Memory memory, bool is_initialised, const char* name, long element,
                   long num_elements) {
  const EmulatorThread& me = running->thread;
  const short thread = me.thread_index_in_threadgroup, simdgroup = me.simdgroup_index_in_threadgroup;
  const uint simd_epoch = simdgroups[simdgroup].epoch[memory];
  Problem problem = {.what = access.what(), .name = name, .element = element, .num_elements = num_elements};
  problem.pc = access.pc;

  // Threadgroup memory is new for each threadgroup; device memory is shared by them all, and nothing orders them.
  const bool was_written = shadow.write_serial && (memory == DEVICE || shadow.write_serial == threadgroup_serial);
  const bool was_read = shadow.read_serial && (memory == DEVICE || shadow.read_serial == threadgroup_serial);
  if (access.reads && !was_written && !is_initialised) {
    problem.kind = "uninitialised";
    report(problem);
  }
  problem.kind = "race";
  if (was_written) {
    const bool is_elsewhere = shadow.write_serial != threadgroup_serial;
    const int other_simdgroup = shadow.writer / (int)SIMD_WIDTH;
    if (is_elsewhere ||
        is_concurrent(memory, shadow.writer, other_simdgroup, shadow.write_epoch, shadow.write_simd_epoch)) {
      problem.other_thread = is_elsewhere ? ANOTHER_THREADGROUP : shadow.writer;
      problem.other_pc = shadow.write_pc;
      report(problem);
    }
  }
  if (access.writes && was_read) {
    const bool is_elsewhere = shadow.read_serial != threadgroup_serial;
    if (is_elsewhere ||
        is_concurrent(memory, shadow.reader, shadow.reader_simdgroup, shadow.read_epoch, shadow.read_simd_epoch)) {
      problem.other_thread = is_elsewhere ? ANOTHER_THREADGROUP : shadow.reader;
      problem.other_pc = shadow.read_pc;
      report(problem);
    }
  }

  if (access.writes) {
    shadow.write_serial = threadgroup_serial;
    shadow.write_epoch = epoch[memory];
    shadow.write_simd_epoch = simd_epoch;
    shadow.writer = thread;
    shadow.write_pc = access.pc;
  }
  if (access.reads) {
    const bool same_epoch = was_read && shadow.read_serial == threadgroup_serial && shadow.read_epoch == epoch[memory];
    if (!same_epoch) {
      shadow.reader = thread;
      shadow.reader_simdgroup = simdgroup;
    } else {
      if (shadow.reader_simdgroup != simdgroup) {
        shadow.reader = shadow.reader_simdgroup = SEVERAL;
      } else if (shadow.read_simd_epoch != simd_epoch) {
        shadow.reader = thread;  // a simdgroup_barrier has ordered the readers before
      } else if (shadow.reader != thread) {
        shadow.reader = SEVERAL;
      }
    }
    shadow.read_serial = threadgroup_serial;
    shadow.read_epoch = epoch[memory];
    shadow.read_simd_epoch = simd_epoch;
    shadow.read_pc = access.pc;
  }
}

void check_range(Shadow* shadow, unsigned long offset, unsigned long element_size, unsigned long size, Access access,
                 Memory memory, bool is_initialised, const char* name) {
  for (unsigned long i = offset / element_size; i * element_size < offset + access.size; i++)
    check_element(shadow[i], access, memory, is_initialised, name, i, size / element_size);
}

// An access outside of everything: described by the array that lies nearest.
[[noreturn]] void report_out_of_bounds(const char* address, Access access) {
  Problem problem = {.kind = "out-of-bounds", .what = access.what(), .name = "private memory"};
  problem.pc = access.pc;
  unsigned long nearest = 1ul << 40;
  auto consider = [&](const char* name, const char* data, unsigned long size, unsigned long element_size) {
    const long offset = address - data;
    const unsigned long distance = offset < 0 ? -offset : offset < (long)size ? 0 : offset - size;
    if (distance >= nearest) return;
    nearest = distance;
    problem.name = name;
    const long bytes = element_size;
    problem.element = offset < 0 ? -((-offset + bytes - 1) / bytes) : offset / bytes;
    problem.num_elements = size / element_size;
  };
  for (uint i = 0; i < num_arrays; i++)
    consider(arrays[i].name, arrays[i].data, arrays[i].size, arrays[i].element_size);
  if (address < stacks || address >= stacks + MAX_THREADS * STACK_BYTES)
    for (uint i = 0; i < launch->num_buffers; i++) {
      const Buffer& buffer = launch->buffers[i];
      consider(buffer.name, buffer.data, buffer.size, buffer.element_size);
    }
  report(problem, true);
  __builtin_unreachable();
}

void check(const void* pointer, Access access) {
  const char* address = (const char*)pointer;
  if (!running) return;
  if (++num_accesses > MAX_ACCESSES)
    report({.kind = "limit", .what = "a loop without end", .name = "", .pc = access.pc}, true);
  const char* stack = stack_of(*running);
  if (address >= stack && address < stack + STACK_BYTES) return;
  if (address >= arena && address < arena + ARENA_BYTES) {
    for (uint i = 0; i < num_arrays; i++) {
      const ThreadgroupArray& array = arrays[i];
      const unsigned long offset = address - array.data;
      if (address < array.data || offset + access.size > array.size) continue;
      check_range(array.shadow, offset, array.element_size, array.size, access, THREADGROUP, false, array.name);
      return;
    }
    report_out_of_bounds(address, access);
  }
  for (uint i = 0; i < launch->num_buffers; i++) {
    const Buffer& buffer = launch->buffers[i];
    const unsigned long offset = address - buffer.data;
    if (address < buffer.data || offset + access.size > buffer.size) continue;
    if (buffer.is_output)
      check_range(buffer_shadows[i], offset, buffer.element_size, buffer.size, access, DEVICE, buffer.is_initialised,
                  buffer.name);
    else if (access.writes)
      report({.kind = "input", .what = "write", .name = buffer.name, .element = (long)(offset / buffer.element_size),
              .num_elements = (long)(buffer.size / buffer.element_size), .pc = access.pc}, true);
    return;
  }
  if (address >= launch->image_begin && address < launch->image_end) return;  // constants of the kernel's own
  report_out_of_bounds(address, access);
}

void check_aligned(const void* address, unsigned long size, unsigned long pc) {
  if (running && (unsigned long)address % size)
    report({.kind = "undefined", .name = "address that is not aligned for its type", .pc = pc}, true);
}

void check_unwritten() {
  for (uint i = 0; i < launch->num_buffers; i++) {
    const Buffer& buffer = launch->buffers[i];
    if (!buffer.is_output || buffer.is_initialised) continue;
    const long num_elements = buffer.size / buffer.element_size;
    for (long element = 0; element < num_elements; element++)
      if (!buffer_shadows[i][element].write_serial) {
        report({.kind = "unwritten", .name = buffer.name, .element = element, .num_elements = num_elements});
        break;
      }
  }
}

// ---- the scheduler

uint random_state;

uint random_below(uint limit) {  // xorshift
  random_state ^= random_state << 13;
  random_state ^= random_state >> 17;
  random_state ^= random_state << 5;
  return random_state % limit;
}

void wait(State state, const char* operation, int line, int flags) {
  Fiber* fiber = running;
  fiber->state = state;
  fiber->operation = operation;
  fiber->line = line;
  fiber->flags = flags;
  yield_to_scheduler();
}

bool waits_for_simdgroup(const Fiber& fiber) {
  return fiber.state == AT_SIMD_OPERATION || fiber.state == AT_SIMDGROUP_BARRIER;
}

// All threads of a simdgroup wait or are done: lets those go on that wait for the operation that is first in the text.
void release_simdgroup(uint index) {
  Simdgroup& group = simdgroups[index];
  const uint begin = index * SIMD_WIDTH, end = num_threads < begin + SIMD_WIDTH ? num_threads : begin + SIMD_WIDTH;
  Fiber* first = nullptr;
  for (uint i = begin; i < end; i++)
    if (waits_for_simdgroup(fibers[i]) && (!first || fibers[i].line < first->line)) first = &fibers[i];
  if (!first) return;
  uint lanes = 0;
  const Fiber* left_out = nullptr;
  for (uint i = begin; i < end; i++) {
    Fiber& fiber = fibers[i];
    if (waits_for_simdgroup(fiber) && fiber.line == first->line && !strcmp(fiber.operation, first->operation)) {
      lanes |= 1u << (i - begin);
      group.arguments[i - begin] = fiber.argument;
      fiber.state = READY;
    } else if (fiber.state != DONE) {
      left_out = &fiber;
    }
  }
  emulator_thread = &first->thread;
  if (launch->is_checked && left_out) {
    Problem problem = {.kind = "divergence", .what = left_out->operation, .name = first->operation};
    problem.other_thread = left_out->thread.thread_index_in_threadgroup;
    problem.line = first->line;
    problem.other_line = left_out->line;
    report(problem);
  }
  if (!first->combine) {
    for (int memory = DEVICE; memory <= THREADGROUP; memory++) group.epoch[memory] += first->flags >> memory & 1;
  } else {
    const uint undefined = first->combine(group.values, group.arguments, lanes, group.results);
    if (undefined && launch->is_checked) {
      emulator_thread = &fibers[begin + __builtin_ctz(undefined)].thread;
      report({.kind = "shuffle", .name = first->operation, .line = first->line});
    }
  }
  emulator_thread = nullptr;
}

// All threads of the threadgroup wait at a threadgroup_barrier or are done.
void release_threadgroup() {
  const Fiber *first = nullptr, *finished = nullptr;
  int flags = 3;
  for (uint i = 0; i < num_threads; i++) {
    Fiber& fiber = fibers[i];
    if (fiber.state == DONE) {
      finished = &fiber;
      continue;
    }
    if (!first) first = &fiber;
    flags &= fiber.flags;
    fiber.state = READY;
    if (launch->is_checked && fiber.line != first->line) {
      emulator_thread = &first->thread;
      Problem problem = {.kind = "barrier", .what = "threadgroup_barrier", .name = "threadgroup_barrier"};
      problem.other_thread = fiber.thread.thread_index_in_threadgroup;
      problem.line = first->line;
      problem.other_line = fiber.line;
      report(problem);
    }
  }
  if (launch->is_checked && finished) {
    emulator_thread = &first->thread;
    Problem problem = {.kind = "barrier", .what = "return", .name = "threadgroup_barrier"};
    problem.other_thread = finished->thread.thread_index_in_threadgroup;
    problem.line = first->line;
    report(problem);
  }
  emulator_thread = nullptr;
  for (int memory = DEVICE; memory <= THREADGROUP; memory++) epoch[memory] += flags >> memory & 1;
}

void run_threadgroup() {
  uint order[MAX_THREADS];
  for (uint i = 0; i < num_threads; i++) order[i] = i;
  while (!is_aborted) {
    if (launch->is_checked)  // any order is right, so take one that no kernel can rely on
      for (uint i = num_threads - 1; i > 0; i--) {
        const uint j = random_below(i + 1), swapped = order[i];
        order[i] = order[j];
        order[j] = swapped;
      }
    bool is_live = false;
    for (uint i = 0; i < num_threads; i++) {
      Fiber& fiber = fibers[order[i]];
      if (fiber.state == READY) resume(fiber);
      if (is_aborted) return;
      is_live |= fiber.state != DONE;
    }
    if (!is_live) return;
    bool is_ready = false;
    for (uint i = 0; i < num_simdgroups; i++) release_simdgroup(i);
    for (uint i = 0; i < num_threads; i++) is_ready |= fibers[i].state == READY;
    if (!is_ready) release_threadgroup();
  }
}

void free_arrays() {
  for (uint i = 0; i < num_arrays; i++) free(arrays[i].shadow);
  num_arrays = 0;
  arena_used = 0;
}

// Metal's dispatchThreads: whole threadgroups as far as they go, smaller ones at the edges of the grid.
void start_threadgroup(uint3 position, uint3 grid, uint3 full, uint3 num_threadgroups) {
  uint3 size;
  for (int d = 0; d < 3; d++) {
    const uint left = grid[d] - position[d] * full[d];
    size[d] = left < full[d] ? left : full[d];
  }
  num_threads = size.x * size.y * size.z;
  num_simdgroups = (num_threads + SIMD_WIDTH - 1) / SIMD_WIDTH;
  threadgroup_serial++;
  free_arrays();
  for (uint i = 0; i < num_simdgroups; i++) simdgroups[i].epoch[DEVICE] = simdgroups[i].epoch[THREADGROUP] = 0;
  for (uint i = 0; i < num_threads; i++) {
    EmulatorThread& thread = fibers[i].thread;
    const uint3 in_group = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
    thread.thread_position_in_grid = position * full + in_group;
    thread.thread_position_in_threadgroup = in_group;
    thread.threadgroup_position_in_grid = position;
    thread.threads_per_threadgroup = size;
    thread.dispatch_threads_per_threadgroup = full;
    thread.threads_per_grid = grid;
    thread.threadgroups_per_grid = num_threadgroups;
    thread.thread_index_in_threadgroup = i;
    thread.thread_index_in_simdgroup = i % SIMD_WIDTH;
    thread.simdgroup_index_in_threadgroup = i / SIMD_WIDTH;
    thread.simdgroups_per_threadgroup = num_simdgroups;
    thread.threads_per_simdgroup = thread.thread_execution_width = SIMD_WIDTH;
    start_fiber(fibers[i]);
  }
}

}  // namespace

extern "C" {

void emulator_launch(Launch* request) {
  launch = request;
  is_aborted = false;
  epoch[DEVICE] = epoch[THREADGROUP] = threadgroup_serial = 0;
  random_state = launch->seed * 2654435761u + 1;
  if (!stacks) stacks = (char*)calloc(MAX_THREADS, STACK_BYTES);  // pages that are never touched cost nothing
  buffer_shadows = (Shadow**)calloc(launch->num_buffers, sizeof(Shadow*));
  for (uint i = 0; launch->is_checked && i < launch->num_buffers; i++) {
    const Buffer& buffer = launch->buffers[i];
    if (buffer.is_output) buffer_shadows[i] = (Shadow*)calloc(buffer.size / buffer.element_size, sizeof(Shadow));
  }
  uint3 grid, full, num_threadgroups;
  for (int d = 0; d < 3; d++) {
    grid[d] = launch->grid[d];
    full[d] = launch->threadgroup[d] < grid[d] ? launch->threadgroup[d] : grid[d] ? grid[d] : 1;
    num_threadgroups[d] = (grid[d] + full[d] - 1) / full[d];
  }
  uint3 position;
  for (position.z = 0; position.z < num_threadgroups.z; position.z++)
    for (position.y = 0; position.y < num_threadgroups.y; position.y++)
      for (position.x = 0; position.x < num_threadgroups.x && !is_aborted; position.x++) {
        start_threadgroup(position, grid, full, num_threadgroups);
        run_threadgroup();
      }
  running = nullptr;
  emulator_thread = nullptr;
  if (launch->is_checked && !is_aborted) check_unwritten();
  for (uint i = 0; i < launch->num_buffers; i++) free(buffer_shadows[i]);
  free(buffer_shadows);
  free_arrays();
}

// ---- what kernels call: see runtime.h

void emulator_barrier(const char* name, int flags, int line) {
  running->combine = nullptr;
  wait(name[0] == 's' ? AT_SIMDGROUP_BARRIER : AT_THREADGROUP_BARRIER, name, line, flags);
}

const void* emulator_simd(const char* name, int line, const void* value, uint size, uint argument,
                          EmulatorCombine combine) {
  Fiber& fiber = *running;
  const uint slot = fiber.thread.thread_index_in_simdgroup * SLOT_BYTES;
  Simdgroup& group = simdgroups[fiber.thread.simdgroup_index_in_threadgroup];
  __builtin_memcpy(group.values + slot, value, size);
  fiber.argument = argument;
  fiber.combine = combine;
  wait(AT_SIMD_OPERATION, name, line, 0);
  return group.results + slot;
}

void* emulator_threadgroup_array(const char* name, int line, unsigned long size, unsigned long element_size) {
  for (uint i = 0; i < num_arrays; i++)
    if (arrays[i].line == line && !strcmp(arrays[i].name, name)) return arrays[i].data;
  unsigned long bytes = 0;
  for (uint i = 0; i < num_arrays; i++) bytes += arrays[i].size;
  if (launch->threadgroup_bytes < bytes + size) launch->threadgroup_bytes = bytes + size;
  const unsigned long end = arena_used + RED_ZONE + (size + 63) / 64 * 64;
  if (num_arrays == MAX_ARRAYS || end + RED_ZONE > ARENA_BYTES)
    report({.kind = "limit", .what = "threadgroup memory beyond all limits", .name = name, .line = line}, true);
  ThreadgroupArray& array = arrays[num_arrays++];
  array = {name, line, arena + arena_used + RED_ZONE, size, element_size, nullptr};
  arena_used = end;
  __builtin_memset(array.data, 0xFF, size);  // as a float: not a number
  if (launch->is_checked) array.shadow = (Shadow*)calloc(size / element_size, sizeof(Shadow));
  return array.data;
}

void emulator_overflow(const char* type, const void* return_address) {
  if (launch->is_checked && running) report({.kind = "overflow", .name = type, .pc = image_offset(return_address)});
}

// ---- the calls that clang's ThreadSanitizer emits

void __tsan_init() {}

#define ACCESS(name, size, reads, writes) \
  void __tsan_##name##size(const void* address) { \
    check_aligned(address, size, image_offset(__builtin_return_address(0))); \
    check(address, {size, reads, writes, image_offset(__builtin_return_address(0))}); \
  } \
  void __tsan_unaligned_##name##size(const void* address) { \
    check(address, {size, reads, writes, image_offset(__builtin_return_address(0))}); \
  }
#define ACCESSES(size) \
  ACCESS(read, size, true, false) \
  ACCESS(write, size, false, true)
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

void* __tsan_memset(void* target, int value, unsigned long size) {
  if (size) check(target, {size, false, true, image_offset(__builtin_return_address(0))});
  return __builtin_memset(target, value, size);
}
void* __tsan_memcpy(void* target, const void* source, unsigned long size) {
  const unsigned long pc = image_offset(__builtin_return_address(0));
  if (size) check(source, {size, true, false, pc}), check(target, {size, false, true, pc});
  return __builtin_memcpy(target, source, size);
}
void* __tsan_memmove(void* target, const void* source, unsigned long size) {
  const unsigned long pc = image_offset(__builtin_return_address(0));
  if (size) check(source, {size, true, false, pc}), check(target, {size, false, true, pc});
  return __builtin_memmove(target, source, size);
}

// ---- the calls that clang's UndefinedBehaviorSanitizer emits

#define UNDEFINED(handler, description, is_fatal) \
  void __ubsan_handle_##handler(void*, unsigned long, unsigned long) { \
    const unsigned long pc = image_offset(__builtin_return_address(0)); \
    if (running) report({.kind = "undefined", .name = description, .pc = pc}, is_fatal); \
  }
UNDEFINED(out_of_bounds, "index outside of an array", true)
UNDEFINED(divrem_overflow, "integer division by zero", true)
UNDEFINED(shift_out_of_bounds, "shift by a negative or too large distance", false)
UNDEFINED(add_overflow, "signed overflow in an addition", false)
UNDEFINED(sub_overflow, "signed overflow in a subtraction", false)
UNDEFINED(mul_overflow, "signed overflow in a multiplication", false)
UNDEFINED(negate_overflow, "signed overflow in a negation", false)
UNDEFINED(float_cast_overflow, "float outside of the range of its integer type", false)
}
