// faults NAME: runs one small kernel, often with a deliberate fault, and prints the launch's result.
#include <hip/hip_runtime.h>

#include <cstdio>

namespace {

constexpr unsigned kThreads = 128;

struct Case {
  const char* name;
  void (*kernel)(unsigned*);
  unsigned blocks = 1;
};

unsigned wave_sum(unsigned v, int lanes) {
  for (int mask = lanes / 2; mask; mask /= 2) v += __shfl_xor(v, mask);
  return v;
}

void spin_until(const unsigned* counter, unsigned target) {
  while (__hip_atomic_load(counter, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT) < target) __builtin_amdgcn_s_sleep(1);
}

const Case kCases[] = {
    {"sum of a wave", [](unsigned* out) { *out = wave_sum(1, warpSize); }},
    {"sum of 32 lanes", [](unsigned* out) { *out = wave_sum(1, 32); }},
    {"wait without end", [](unsigned* out) { spin_until(out, 1); }},
    {"divergent barrier",
     [](unsigned*) {
       if (threadIdx.x < 64) __syncthreads();
     }},
    {"two barriers",
     [](unsigned*) {
       if (threadIdx.x < 64) __syncthreads();
       else
         __syncthreads();
     }},
    {"barrier after exit",
     [](unsigned*) {
       if (threadIdx.x == 5) return;
       __syncthreads();
     }},
    {"shuffle after exit",
     [](unsigned* out) {
       if (threadIdx.x == 0) return;
       *out = __shfl(1u, 0);
     }},
    {"barrier and shuffle",
     [](unsigned* out) {
       if (threadIdx.x < 64 || threadIdx.x == 127) __syncthreads();
       else
         *out = __shfl(1u, 0);
     }},
    {"beyond dynamic shared memory",
     [](unsigned* out) {
       HIP_DYNAMIC_SHARED(unsigned, shared)
       *out = shared[threadIdx.x * 64];
     }},
    {"misaligned vector",
     [](unsigned* out) {
       HIP_DYNAMIC_SHARED(unsigned, shared)
       *out = reinterpret_cast<uint4*>(shared + 1)->x;
     }},
    {"uninitialised shared memory",
     [](unsigned* out) {
       __shared__ unsigned word;
       if (threadIdx.x > 0) return;  // no rendezvous, so the order of the threads changes from block to block
       *out = word;
       word = 0;  // the next block finds it poisoned again
     },
     3},
};

}  // namespace

int main(int, char** argv) {
  for (const Case& c : kCases) {
    if (strcmp(c.name, argv[1])) continue;
    unsigned out = 0;
    unsigned* argument = &out;
    void* args[] = {&argument};
    const hipError_t code = hipLaunchKernel(c.kernel, dim3(c.blocks), dim3(kThreads), args, 512, nullptr);
    if (code == hipSuccess) printf("ok %x\n", out);
    else printf("error %d: %s\n", code, hipGetErrorString(code));
    return 0;
  }
  return 1;
}
