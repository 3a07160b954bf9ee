// What a kernel compiled for the emulator and the runtime that runs it know of each other. No header of the system is
// needed, and none is visible to a kernel.
#pragma once

typedef unsigned int uint;
typedef uint uint3 __attribute__((ext_vector_type(3)));

constexpr uint SIMD_WIDTH = 32;
constexpr uint SLOT_BYTES = 16;  // the largest value that a simdgroup operation moves: float4

// One thread of the grid. The names are those of Metal's attributes: a kernel's parameter `[[name]]` is its field.
struct EmulatorThread {
  uint3 thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
  uint3 threads_per_threadgroup, dispatch_threads_per_threadgroup, threads_per_grid, threadgroups_per_grid;
  uint thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  uint simdgroups_per_threadgroup, threads_per_simdgroup, thread_execution_width;
};

// How a simdgroup operation makes its results: `values` and `results` have a slot a lane, `lanes` a bit for each lane
// that takes part, `arguments` what each lane gave beside its value (the lane to read from, the distance to shift).
// Returns the lanes whose result is undefined, because they read from a lane that takes no part.
typedef uint (*EmulatorCombine)(const char* values, const uint* arguments, uint lanes, char* results);

extern "C" {
extern const EmulatorThread* emulator_thread;  // the thread that runs now
void emulator_barrier(const char* name, int flags, int line);  // flags: 1 orders device memory, 2 threadgroup memory
const void* emulator_simd(const char* name, int line, const void* value, uint size, uint argument, EmulatorCombine);
void* emulator_threadgroup_array(const char* name, int line, unsigned long size, unsigned long element_size);
void emulator_overflow(const char* type, const void* return_address);  // a finite float became an infinite `type`
}
