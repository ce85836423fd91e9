/* Launches: blocks one after the other, the threads of a block as fibers. A fiber runs until it waits, and is
 * resumed when what it waits for has come; order is fixed, so a run can be repeated. */
#include "emulation_internal.h"

#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulation
{

dim3 thread_index, block_index, block_size, grid_size;

enum state { RUNNING, AT_BARRIER, IN_WARP, ENDED };

static const size_t STACK_BYTES = 256 << 10;
static const unsigned MAX_THREADS = 1024;

struct fiber {
    state waits = ENDED;
    bool started = false, arrived = false;
    jmp_buf where;
    char *stack = nullptr;
    unsigned n_exchanges = 0;
};

/* An exchange under way: lanes that have come, and what they brought, this time and the time before: a lane
 * may read the old words while a faster one brings the next. */
struct meeting {
    unsigned come = 0, n_times = 0;
    uint64_t words[2][32];
};

/* Who touched a word of shared memory last, and after how many barriers and exchanges. */
struct touch {
    int writer = -1, reader = -1; /* reader -2: several */
    unsigned written = 0, read = 0, writer_exchange = 0, reader_exchange = 0;
    bool defined = false;
};

static fiber fibers[MAX_THREADS];
/* Of each warp: for all its lanes, and for parts of it by their first lane. */
static meeting meetings[MAX_THREADS / 32][33];
static unsigned current, n_threads, n_barriers;
static jmp_buf scheduler;
static const kernel *running;
static const void *running_args;
static bool failed;
static std::vector<char> shared_bytes_store;
static std::vector<touch> touches;
static kernel *kernels;

kernel::kernel(const char *name_, void (*run_)(const void *args), size_t args_bytes_)
    : name(name_), run(run_), args_bytes(args_bytes_), next(kernels)
{
    kernels = this;
}

const kernel *find_kernel(const char *name)
{
    for (const kernel *k = kernels; k; k = k->next)
        if (!strcmp(k->name, name))
            return k;
    return nullptr;
}

void fault(const char *fmt, ...)
{
    if (failed)
        return;
    failed = true;
    char text[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    fprintf(stderr, "emulated device: kernel %s, block %u,%u, thread %u: %s\n", running ? running->name : "?",
            block_index.x, block_index.y, current, text);
}

/* ---- switching ---- */

#if defined(__SANITIZE_ADDRESS__)
static void *fake_stack;
static const void *main_stack;
static size_t main_stack_bytes;
static void before_switch(const void *stack, size_t n_bytes)
{
    __sanitizer_start_switch_fiber(&fake_stack, stack, n_bytes);
}
static void after_switch(const void **ret_stack, size_t *ret_bytes)
{
    __sanitizer_finish_switch_fiber(nullptr, ret_stack, ret_bytes);
}
#else
static const void *main_stack;
static size_t main_stack_bytes;
static void before_switch(const void *, size_t)
{
}
static void after_switch(const void **, size_t *)
{
}
#endif

/* Back to the scheduler until it resumes this fiber. */
static __attribute__((noinline)) void wait_as(state why)
{
    fiber &f = fibers[current];
    f.waits = why;
    if (_setjmp(f.where) == 0) {
        before_switch(main_stack, main_stack_bytes);
        _longjmp(scheduler, 1);
    }
    after_switch(&main_stack, &main_stack_bytes);
}

static void fiber_main()
{
    after_switch(&main_stack, &main_stack_bytes);
    for (;;) {
        running->run(running_args);
        wait_as(ENDED);
    }
}

/* The first time a fiber runs, its stack is made its own. */
static void enter(fiber &f)
{
    static ucontext_t context, from;
    f.started = true;
    if (!f.stack) {
        void *p = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) {
            fprintf(stderr, "emulated device: no memory for a thread's stack\n");
            abort();
        }
        f.stack = static_cast<char *>(p);
    }
    getcontext(&context);
    context.uc_stack.ss_sp = f.stack;
    /* tops out of step: stacks a power of two apart would compete for one set of the first level cache */
    context.uc_stack.ss_size = STACK_BYTES - (size_t)(&f - fibers) % 32 * (17 * 64);
    context.uc_link = nullptr;
    makecontext(&context, fiber_main, 0);
    before_switch(f.stack, STACK_BYTES);
    swapcontext(&from, &context);
}

/* noinline: the switch must not see the scheduler's variables in registers */
static __attribute__((noinline)) void resume(unsigned t)
{
    current = t;
    thread_index = dim3{t % block_size.x, t / block_size.x % block_size.y, t / block_size.x / block_size.y};
    fiber &f = fibers[t];
    f.waits = RUNNING;
    if (_setjmp(scheduler) == 0) {
        if (!f.started)
            enter(f);
        before_switch(f.stack, STACK_BYTES);
        _longjmp(f.where, 1);
    }
    after_switch(nullptr, nullptr);
}

/* ---- waiting ---- */

void barrier()
{
    wait_as(AT_BARRIER);
}

static unsigned warp_of(unsigned t)
{
    return t / 32 * 32;
}

const uint64_t *exchange(unsigned mask, uint64_t value)
{
    fiber &f = fibers[current];
    unsigned lane = current % 32, base = warp_of(current);
    if (!(mask >> lane & 1))
        fault("a lane that is not in the mask %#x of its shuffle", mask);
    meeting &m = meetings[base / 32][mask == 0xffffffffu ? 32 : __builtin_ctz(mask)];
    uint64_t *words = m.words[m.n_times & 1];
    words[lane] = value;
    m.come |= 1u << lane;
    f.n_exchanges++;
    if (m.come != mask) {
        f.arrived = true;
        wait_as(IN_WARP);
        return words;
    }
    m.come = 0;
    m.n_times++;
    for (unsigned l = 0; l < 32; l++)
        if (mask >> l & 1)
            fibers[base + l].arrived = false;
    return words;
}

/* ---- shared memory ---- */

void *shared_memory(size_t *ret_bytes)
{
    *ret_bytes = shared_bytes_store.size();
    return shared_bytes_store.data();
}

/* Did the thread that touched a word then do so in an order that this one can rely on? */
static bool ordered(int other, unsigned at_barrier, unsigned at_exchange)
{
    if (other == (int)current || at_barrier != n_barriers)
        return true;
    return other >= 0 && warp_of((unsigned)other) == warp_of(current) &&
           at_exchange < fibers[current].n_exchanges;
}

void note_shared(const void *p, size_t n_bytes, bool write)
{
    if (!check_order)
        return;
    size_t first = (size_t)(static_cast<const char *>(p) - shared_bytes_store.data()) / 4,
           n = n_bytes / 4 > 0 ? n_bytes / 4 : 1;
    for (size_t i = first; i < first + n; i++) {
        touch &w = touches[i];
        if (!write && !w.defined)
            fault("reads byte %zu of shared memory, which nobody has written", 4 * i);
        if (w.writer != -1 && !ordered(w.writer, w.written, w.writer_exchange))
            fault("%s byte %zu of shared memory, which thread %d has written, without a barrier in between",
                  write ? "writes" : "reads", 4 * i, w.writer);
        if (write && w.reader != -1 && !ordered(w.reader, w.read, w.reader_exchange))
            fault("writes byte %zu of shared memory, which thread %d has read, without a barrier in between",
                  4 * i, w.reader);
        if (write) {
            w.writer = (int)current;
            w.written = n_barriers;
            w.writer_exchange = fibers[current].n_exchanges;
            w.defined = true;
        } else {
            w.reader = w.reader != -1 && w.read == n_barriers && w.reader != (int)current ? -2 : (int)current;
            w.read = n_barriers;
            w.reader_exchange = fibers[current].n_exchanges;
        }
    }
}

/* ---- launches ---- */

/* What is left when nobody can go on: all ended, all at the barrier, or a fault. */
static bool end_of_step()
{
    unsigned n_ended = 0, n_barrier = 0;
    for (unsigned t = 0; t < n_threads; t++) {
        n_ended += fibers[t].waits == ENDED;
        n_barrier += fibers[t].waits == AT_BARRIER;
    }
    if (n_ended == n_threads)
        return false;
    if (n_barrier == n_threads) {
        n_barriers++;
        for (unsigned t = 0; t < n_threads; t++)
            fibers[t].waits = RUNNING;
        return true;
    }
    fault("%u of %u threads wait at a barrier and %u for a shuffle that the others never come to", n_barrier,
          n_threads, n_threads - n_barrier - n_ended);
    return false;
}

static void run_block(size_t shared_bytes)
{
    shared_bytes_store.assign(shared_bytes, (char)0xff);
    shared_bytes_store.shrink_to_fit();
    touches.assign(check_order ? shared_bytes / 4 + 1 : 0, touch());
    n_barriers = 1;
    for (unsigned t = 0; t < n_threads; t++) {
        fibers[t].waits = RUNNING;
        fibers[t].arrived = false;
        fibers[t].n_exchanges = 0;
    }
    for (unsigned w = 0; w <= (n_threads - 1) / 32; w++)
        for (meeting &m : meetings[w])
            m.come = 0;
    do {
        for (unsigned w = 0; w < n_threads;
             w += 32) /* a warp as far as it goes: its fibers stay in the cache */
            for (bool any = true; any;) {
                any = false;
                for (unsigned t = w; t < w + 32 && t < n_threads; t++) {
                    const fiber &f = fibers[t];
                    if (f.waits == RUNNING || (f.waits == IN_WARP && !f.arrived)) {
                        resume(t);
                        any = true;
                    }
                }
            }
    } while (end_of_step() && !failed);
    if (failed) /* fibers that still wait are given up: they begin anew */
        for (unsigned t = 0; t < n_threads; t++)
            fibers[t].started = fibers[t].started && fibers[t].waits == ENDED;
}

bool launch(const kernel *k, dim3 grid, dim3 block, size_t shared_bytes, const void *args)
{
    std::vector<char> copy(static_cast<const char *>(args), static_cast<const char *>(args) + k->args_bytes);
    running = k;
    running_args = copy.data();
    grid_size = grid;
    block_size = block;
    n_threads = block.x * block.y * block.z;
    failed = false;
    for (unsigned y = 0; y < grid.y && !failed; y++)
        for (unsigned x = 0; x < grid.x && !failed; x++) {
            block_index = dim3{x, y, 0};
            run_block(shared_bytes);
        }
    running = nullptr;
    return !failed;
}

} /* namespace emulation */
