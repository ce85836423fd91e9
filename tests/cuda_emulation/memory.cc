/* Buffers of the emulated device. Their addresses lie in a range that can not be read or written, so that a
 * host that follows one ends at once; the memory itself is the heap's, where sanitizers watch it. An address
 * is used once only: freed ones stay dead. */
#include "emulation_internal.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <sys/mman.h>

namespace emulation
{

struct buffer {
    size_t n_bytes;
    char *memory;
};

static const size_t RANGE_BYTES = (size_t)1 << 42, ALIGN_BYTES = 256;
static char *range, *next_address;
static std::map<const char *, buffer> buffers;
static size_t bytes_used, bytes_total = (size_t)4 << 30;

/* What configure() asked for. */
static std::string fail_call;
static long fail_at, n_calls;
static int fail_code, broken;
int n_devices = 1, architecture = 90;
bool check_order = true;

static void configure_one(const std::string &item)
{
    size_t colon = item.find(':');
    std::string key = item.substr(0, colon), rest = colon == std::string::npos ? "" : item.substr(colon + 1);
    if (key == "memory")
        bytes_total = (size_t)atoll(rest.c_str());
    else if (key == "devices")
        n_devices = atoi(rest.c_str());
    else if (key == "unordered")
        check_order = false;
    else if (key == "architecture")
        architecture = atoi(rest.c_str());
    else {
        fail_call = key;
        fail_at = atol(rest.c_str());
        colon = rest.find(':');
        fail_code = colon == std::string::npos ? (int)ILLEGAL_ADDRESS : atoi(rest.c_str() + colon + 1);
    }
}

/* Settings separated by commas: memory:BYTES, devices:N, architecture:NN, unordered (shared memory is not
 * checked for barriers), CALL:N:CODE (the Nth call of CALL gives CODE; codes of 700 and more break the
 * device). Everything else starts anew. */
extern "C" void qc_emulation_configure(const char *text)
{
    fail_call.clear();
    n_calls = fail_at = broken = 0;
    bytes_total = (size_t)4 << 30;
    n_devices = 1;
    architecture = 90;
    check_order = true;
    std::string all = text ? text : "";
    for (size_t at = 0; at < all.size();) {
        size_t end = all.find(',', at);
        configure_one(all.substr(at, end == std::string::npos ? end : end - at));
        at = end == std::string::npos ? all.size() : end + 1;
    }
}

/* How often the call that configure() named was made. */
extern "C" long qc_emulation_calls()
{
    return n_calls;
}

extern "C" long qc_emulation_buffers()
{
    return (long)buffers.size();
}

int begin_call(const char *name)
{
    if (broken)
        return broken;
    if (fail_call != name || ++n_calls != fail_at)
        return SUCCESS;
    if (fail_code >= ILLEGAL_ADDRESS)
        broken = fail_code;
    return fail_code;
}

void break_device(int code)
{
    broken = code;
}

void *buffer_new(size_t n_bytes)
{
    if (!range) {
        void *p = mmap(nullptr, RANGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) {
            fprintf(stderr, "emulated device: no range of addresses\n");
            abort();
        }
        range = next_address = static_cast<char *>(p);
    }
    if (bytes_used + n_bytes > bytes_total || n_bytes > RANGE_BYTES / 2)
        return nullptr;
    size_t step = (n_bytes + 2 * ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
    if (next_address + step > range + RANGE_BYTES)
        return nullptr;
    void *memory = nullptr;
    if (posix_memalign(&memory, ALIGN_BYTES, n_bytes))
        return nullptr;
    memset(memory, 0xff, n_bytes); /* NaN: whoever reads before writing shall see it */
    char *address = next_address;
    next_address += step;
    buffers[address] = buffer{n_bytes, static_cast<char *>(memory)};
    bytes_used += n_bytes;
    return address;
}

bool buffer_free(void *address)
{
    auto it = buffers.find(static_cast<char *>(address));
    if (it == buffers.end())
        return false;
    bytes_used -= it->second.n_bytes;
    free(it->second.memory);
    buffers.erase(it);
    return true;
}

size_t buffers_left()
{
    return buffers.size();
}

size_t bytes_free(size_t *ret_total)
{
    *ret_total = bytes_total;
    return bytes_total - bytes_used;
}

bool is_device_address(const void *p)
{
    const char *c = static_cast<const char *>(p);
    return range && c >= range && c < range + RANGE_BYTES;
}

/* The buffer that an address lies in or just behind. */
static const buffer *find(const char *address, const char **ret_start)
{
    auto it = buffers.upper_bound(address);
    if (it == buffers.begin())
        return nullptr;
    --it;
    if (address > it->first + it->second.n_bytes)
        return nullptr;
    *ret_start = it->first;
    return &it->second;
}

void *resolve(const void *address, void **ret_begin, void **ret_end)
{
    const char *start, *c = static_cast<const char *>(address);
    const buffer *b = is_device_address(address) ? find(c, &start) : nullptr;
    *ret_begin = *ret_end = nullptr;
    if (!b) {
        fault("%p is %s", address,
              is_device_address(address) ? "no buffer of the device" : "no device address");
        return nullptr;
    }
    *ret_begin = b->memory;
    *ret_end = b->memory + b->n_bytes;
    return b->memory + (c - start);
}

void *buffer_range(const char *call, const void *address, size_t n_bytes)
{
    const char *start, *c = static_cast<const char *>(address);
    const buffer *b = is_device_address(address) ? find(c, &start) : nullptr;
    if (!b || (size_t)(c - start) + n_bytes > b->n_bytes) {
        fprintf(stderr, "emulated device: %s: %zu bytes at %p are not within a buffer of the device\n", call,
                n_bytes, address);
        return nullptr;
    }
    return b->memory + (c - start);
}

} /* namespace emulation */
