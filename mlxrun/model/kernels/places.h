// A part of the kernels and of no header: MLX finds the names of Metal's attributes in a kernel's source.
#define BLOCK_X int(threadgroup_position_in_grid.x)
#define BLOCK_Y int(threadgroup_position_in_grid.y)
#define BLOCK_Z int(threadgroup_position_in_grid.z)
#define BLOCKS_X int(threadgroups_per_grid.x)
#define THREAD int(thread_position_in_threadgroup.x)
