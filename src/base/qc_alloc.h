/* The one door to the heap. Every allocation of the project (outside src/runtime) goes through it, so that
 * tests can make the Nth one fail and see a clean error and no leak. */
#ifndef QC_ALLOC_H
#define QC_ALLOC_H

#include <stddef.h>

/* n_elems * elem_bytes, uninitialised / zeroed, 64-byte aligned; NULL when out of memory or on overflow.
 * A request of 0 bytes returns a valid pointer. Free with qc_free. */
void *qc_alloc(size_t n_elems, size_t elem_bytes);
void *qc_calloc(size_t n_elems, size_t elem_bytes);

/* Grow or shrink p (NULL: allocate) from old_bytes to new_bytes; NULL on failure, p then still valid. */
void *qc_realloc(void *p, size_t old_bytes, size_t new_bytes);

/* NUL-terminated copy of the first n_bytes of s / of the whole string; NULL when out of memory. */
char *qc_strndup(const char *s, size_t n_bytes);
char *qc_strdup(const char *s);

/* printf into a new string; NULL when out of memory. */
char *qc_asprintf(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* n_bytes with the alignment of malloc, for trees of many small objects (64-byte alignment doubles their
 * size). */
void *qc_alloc_small(size_t n_bytes);

/* NULL is fine. */
void qc_free(void *p);

/* Once, at the start of a program whose memory is planned: large blocks are the system's again as soon as
 * they are freed. Otherwise the allocator keeps them and cuts them up: a fifth more than what is in use. */
void qc_alloc_return_large(void);

/* Hand freed memory back to the system, after a phase whose many small objects are gone. */
void qc_alloc_trim(void);

/* Tests only: make the nth (1-based) next allocation of this process fail, 0 switches it off. Returns how
 * many allocations were made since the last call. */
long qc_alloc_fail_at(long nth);

#endif
