/* Shared by the source files of libqpk. */
#ifndef QPK_INTERNAL_H
#define QPK_INTERNAL_H

#include "qpk.h"

#include <stdbool.h>
#include <string.h>

/* A name and what it stands for, sorted by name for look-up. */
typedef struct qpk_name {
    const char *name;
    int64_t index;
} qpk_name;

typedef struct qpk_index {
    qpk_name *entries;
    int64_t n_entries;
} qpk_index;

typedef struct qpk_alias {
    const char *name;
    int64_t target;
} qpk_alias;

typedef struct qpk_section {
    uint64_t offset, n_bytes;
    uint32_t count, crc32;
} qpk_section;

struct qpk_file {
    const uint8_t *data;
    size_t n_bytes;
    bool mapped;         /* data is ours to unmap */
    char *path;          /* owned; for messages */
    const char *strings; /* the section of names */
    uint64_t strings_bytes;
    const uint8_t *values; /* the section of metadata values */
    uint64_t values_bytes;
    qpk_tensor *tensors;
    qpk_alias *aliases;
    qpk_meta *metas;
    qpk_side_file *files;
    int64_t n_tensors, n_aliases, n_metas, n_files;
    qpk_index tensor_index; /* tensors and aliases */
    qpk_index meta_index, file_index;
};

/* Write a message with control characters replaced by '?' and return the code. */
int qpk_fail(char *err, size_t err_bytes, int code, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

static inline uint16_t qpk_u16(const uint8_t *p)
{
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline uint32_t qpk_u32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline uint64_t qpk_u64(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Bits of an element of a dense type, 0 for an unknown id. */
int qpk_dtype_bits(unsigned dtype);

#endif
