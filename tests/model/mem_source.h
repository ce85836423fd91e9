/* A source in memory that tests may edit: tensors as float32, side files as text. Every failure ends the
 * test. */
#ifndef QC_TEST_MEM_SOURCE_H
#define QC_TEST_MEM_SOURCE_H

#include "qc_source.h"

#define MEM_TENSORS 512
#define MEM_FILES   8

typedef struct mem_tensor {
    qc_tensor_info info; /* name owned; dtype may be edited, the values stay float32 */
    float *values;       /* owned */
} mem_tensor;

typedef struct mem_source {
    qc_source base; /* first: a mem_source is used as a qc_source */
    mem_tensor tensors[MEM_TENSORS];
    char *file_names[MEM_FILES], *file_texts[MEM_FILES]; /* owned */
} mem_source;

/* An empty source / a copy of another one with its side files; close with mem_close. */
mem_source *mem_new(void);
mem_source *mem_copy(const qc_source *src);
/* Copy of tests/data/models/tiny/NAME. */
mem_source *mem_tiny(const char *name);
void mem_close(mem_source *m);

/* Add a tensor of zeros; rows 0 makes a vector of cols elements. Returns its values. */
float *mem_add(mem_source *m, const char *name, int64_t rows, int64_t cols);
void mem_remove(mem_source *m, const char *name);
/* Remove every tensor whose name ends so. */
void mem_remove_all(mem_source *m, const char *ending);
/* Set every element of the tensors whose name ends so: x = x * factor + offset. */
void mem_scale_all(mem_source *m, const char *ending, float factor, float offset);
mem_tensor *mem_tensor_of(mem_source *m, const char *name);

/* Set a side file; NULL removes it. */
void mem_set_file(mem_source *m, const char *name, const char *text);
/* Change members of a side file that is a json object: patch {"key": value, ...}; "ABSENT" removes the
 * member. */
void mem_patch_file(mem_source *m, const char *name, const char *patch);
void mem_patch(mem_source *m, const char *patch); /* of config.json */

/* A random model of a family (config.json included) with these sizes; biases as the family has without keys.
 */
typedef struct mem_shape {
    const char *family, *class_name;
    int hidden, n_layers, n_heads, n_kv_heads, head_dim, ffn, vocab;
    bool qk_norm;
} mem_shape;
mem_source *mem_random(const mem_shape *shape, uint64_t seed);

#endif
