// What a compiled kernel and the emulated GPU (machine.cpp) know of each other.
#pragma once

namespace machine {
constexpr unsigned SIMD = 32;  // threads of a simdgroup
struct Place { unsigned x, y, z; };
extern Place group, group_start, group_size, groups, grid;  // of the threadgroup that runs
inline Place place_in_grid(Place p) { return {group_start.x + p.x, group_start.y + p.y, group_start.z + p.z}; }
unsigned thread_index();                       // in its threadgroup
// Give `size` bytes to the simdgroup, and take those of its thread `partner`. `site` tells exchanges apart.
void exchange(void* value, unsigned size, unsigned partner, const void* site);
void wait_at_barrier(const void* site);
}  // namespace machine

// What a compiled kernel defines.
extern "C" {
extern const unsigned kernel_buffers;           // how many it has
extern const unsigned char kernel_writes[];     // of each: whether it is an output
void kernel_thread(unsigned char** buffers, machine::Place position);
}
