/* The emulator's side of src/compute/cuda/kernel.cuh: kernels as C++ functions, the threads of a block as
 * fibers that run until the next barrier or shuffle. Pointers are views that know their buffer, so that a
 * kernel is told what a real device keeps to itself: reads and writes outside a buffer, addresses that are
 * none of the device's, vector loads that are not aligned, shared memory that is read before it was written
 * or without a barrier in between. The first fault of a launch is printed and the launch fails. */
#ifndef QC_CUDA_EMULATION_H
#define QC_CUDA_EMULATION_H

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace emulation
{

struct dim3 {
    unsigned x, y, z;
};

/* Of the thread that runs. */
extern dim3 thread_index, block_index, block_size, grid_size;

/* Prints "kernel K, block B, thread T: ..." for the first fault of a launch and makes the launch fail. */
void fault(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Real memory of a device address, and the end of its buffer; NULL and a fault for any other address. */
void *resolve(const void *address, void **ret_begin, void **ret_end);

/* The block's dynamic shared memory. */
void *shared_memory(size_t *ret_bytes);

/* Reading or writing n bytes of shared memory: is it ordered against what the other threads did? */
void note_shared(const void *p, size_t n_bytes, bool write);

template <class T> class reference;

/* A pointer with its bounds. T const: elements are read only. */
template <class T> class pointer
{
  public:
    typedef typename std::remove_const<T>::type value;
    T *p, *begin, *end;
    bool shared;

    bool good(int64_t i, int64_t n = 1) const
    {
        if (p + i >= begin && p + i + n <= end)
            return true;
        fault("element %lld of a %s buffer of %lld", (long long)(p + i - begin), shared ? "shared" : "global",
              (long long)(end - begin));
        return false;
    }
    value read(int64_t i) const
    {
        if (!good(i))
            return value();
        if (shared)
            note_shared(p + i, sizeof(T), false);
        value v;
        memcpy(&v, p + i, sizeof v);
        return v;
    }
    void write(int64_t i, value v) const
    {
        if (!good(i))
            return;
        if (shared)
            note_shared(p + i, sizeof(T), true);
        memcpy(const_cast<value *>(p + i), &v, sizeof v);
    }
    typename std::conditional<std::is_const<T>::value, value, reference<T>>::type operator[](int64_t i) const
    {
        if constexpr (std::is_const<T>::value)
            return read(i);
        else
            return reference<T>{*this, i};
    }
    pointer operator+(int64_t i) const
    {
        return pointer{p + i, begin, end, shared};
    }
};

template <class T> class reference
{
  public:
    pointer<T> at;
    int64_t i;

    operator T() const
    {
        return at.read(i);
    }
    const reference &operator=(const T &v) const
    {
        at.write(i, v);
        return *this;
    }
    const reference &operator=(const reference &other) const
    {
        return *this = (T)other;
    }
    const reference &operator+=(T v) const
    {
        return *this = (T) * this + v;
    }
    const reference &operator-=(T v) const
    {
        return *this = (T) * this - v;
    }
    const reference &operator*=(T v) const
    {
        return *this = (T) * this * v;
    }
};

/* Values of the lanes of `mask` (which all must come), in an array by lane; valid until the next exchange. */
const uint64_t *exchange(unsigned mask, uint64_t value);
void barrier();

template <class T> T shuffle(unsigned mask, T v, int lane)
{
    static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle moves at most 8 bytes");
    uint64_t word = 0;
    memcpy(&word, &v, sizeof v);
    const uint64_t *words = exchange(mask, word);
    memcpy(&v, &words[lane & 31], sizeof v);
    return v;
}

/* A kernel and the size of its arguments. */
struct kernel {
    const char *name;
    void (*run)(const void *args);
    size_t args_bytes;
    kernel *next;
    kernel(const char *name, void (*run)(const void *args), size_t args_bytes);
};

} /* namespace emulation */

#define threadIdx emulation::thread_index
#define blockIdx  emulation::block_index
#define blockDim  emulation::block_size
#define gridDim   emulation::grid_size

#define QC_KERNEL(name, args, threads)                                                                       \
    static void qc_cuda_##name(const qc_cuda_##args##_args &a);                                              \
    static emulation::kernel qc_cuda_##name##_entry(                                                         \
        "qc_cuda_" #name,                                                                                    \
        [](const void *p) { qc_cuda_##name(*static_cast<const qc_cuda_##args##_args *>(p)); },               \
        sizeof(qc_cuda_##args##_args));                                                                      \
    static void qc_cuda_##name([[maybe_unused]] const qc_cuda_##args##_args &a)
#define QC_DEVICE static inline
#define QC_UNROLL

template <class T> static inline emulation::pointer<T> qc_view(T *address)
{
    void *begin, *end;
    T *p = static_cast<T *>(emulation::resolve(address, &begin, &end));
    return emulation::pointer<T>{p, static_cast<T *>(begin), static_cast<T *>(end), false};
}

template <class T> static inline emulation::pointer<T> qc_shared()
{
    size_t n_bytes;
    T *p = static_cast<T *>(emulation::shared_memory(&n_bytes));
    return emulation::pointer<T>{p, p, p + n_bytes / sizeof(T), true};
}

struct float4 {
    float x, y, z, w;
};

template <class T> static inline float4 qc_load4(emulation::pointer<T> p)
{
    float4 v = {0, 0, 0, 0};
    if ((uintptr_t)p.p % sizeof v)
        emulation::fault("vector load %d bytes off a multiple of 16", (int)((uintptr_t)p.p % sizeof v));
    else if (p.good(0, 4))
        v = float4{p[0], p[1], p[2], p[3]};
    return v;
}

static inline void qc_store4(emulation::pointer<float> p, float4 v)
{
    if ((uintptr_t)p.p % sizeof v)
        emulation::fault("vector store %d bytes off a multiple of 16", (int)((uintptr_t)p.p % sizeof v));
    else if (p.good(0, 4)) {
        p.write(0, v.x);
        p.write(1, v.y);
        p.write(2, v.z);
        p.write(3, v.w);
    }
}

static inline float qc_mul_add(float x, float y, float z)
{
    return x * y + z;
}

static inline void __syncthreads()
{
    emulation::barrier();
}

template <class T> static inline T __shfl_sync(unsigned mask, T v, int lane)
{
    return emulation::shuffle(mask, v, lane);
}

template <class T> static inline T __shfl_xor_sync(unsigned mask, T v, int lanes)
{
    return emulation::shuffle(mask, v, (int)(emulation::thread_index.x % 32) ^ lanes);
}

#endif
