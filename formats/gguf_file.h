/* The GGUF container (docs/formats/gguf.md), for whatever is kept in one: models, importance matrices. What
 * was parsed is checked: every key, string, array and tensor lies inside the file. */
#ifndef QC_GGUF_FILE_H
#define QC_GGUF_FILE_H

#include "qc_blocks.h"
#include "qc_buf.h"
#include "qc_map.h"

#define QC_GGUF_ALIGNMENT      32
#define QC_GGUF_MAX_NAME_BYTES 63 /* of a tensor: longer names are refused by engines */

/* Types of values, as stored. */
typedef enum {
    QC_GGUF_U8 = 0,
    QC_GGUF_I8 = 1,
    QC_GGUF_U16 = 2,
    QC_GGUF_I16 = 3,
    QC_GGUF_U32 = 4,
    QC_GGUF_I32 = 5,
    QC_GGUF_F32 = 6,
    QC_GGUF_BOOL = 7,
    QC_GGUF_STRING = 8,
    QC_GGUF_ARRAY = 9,
    QC_GGUF_U64 = 10,
    QC_GGUF_I64 = 11,
    QC_GGUF_F64 = 12
} qc_gguf_kind;

/* Bytes of the file, not NUL-terminated; p NULL: there is none. */
typedef struct qc_gguf_text {
    const char *p;
    size_t n_bytes;
} qc_gguf_text;

typedef struct qc_gguf_value {
    qc_gguf_text key;
    bool is_array;
    qc_gguf_kind kind; /* of the value, or of the elements */
    uint64_t n_elems;  /* 1 if it is no array */
    const uint8_t *data;
} qc_gguf_value;

typedef struct qc_gguf_tensor {
    const char *name; /* owned by the file, NUL-terminated */
    const qc_block_info *type;
    int n_dims;
    int64_t ne[QC_MAX_DIMS]; /* as stored: the contiguous dimension first */
    uint64_t offset;         /* of the first byte, from the beginning of the file */
    uint64_t n_bytes;
} qc_gguf_tensor;

typedef struct qc_gguf_file {
    const char *path; /* borrowed, for messages */
    const uint8_t *data;
    size_t n_bytes;
    int64_t n_values, n_tensors;
    qc_gguf_value *values;
    qc_gguf_tensor *tensors;
    char *names; /* storage of the names */
    qc_map *value_of, *tensor_of;
} qc_gguf_file;

/* Does a file of these first bytes begin like one? */
bool qc_gguf_probe(const void *data, size_t n_bytes);

/* Parse a whole file that the caller keeps mapped or allocated. QC_E_INPUT: a rule of the format is broken;
 * QC_E_UNSUPPORTED: another version, a type of tensor that is not read. Nothing to clear on failure. */
int qc_gguf_parse(const void *data, size_t n_bytes, const char *path, qc_gguf_file *ret,
                  qc_err *err) QC_WARN_UNUSED;
/* NULL is fine. */
void qc_gguf_clear(qc_gguf_file *file);

/* NULL if there is no such key / tensor. */
const qc_gguf_value *qc_gguf_find(const qc_gguf_file *file, const char *key);
const qc_gguf_tensor *qc_gguf_tensor_find(const qc_gguf_file *file, const char *name);

/* Value of a key, `absent` if there is none. QC_E_INPUT: it is of another kind, no finite number, or out of
 * range. Any kind of integer will do for an integer, F32 and F64 for a number. */
int qc_gguf_get_int(const qc_gguf_file *file, const char *key, int64_t absent, int64_t lo, int64_t hi,
                    int64_t *ret, qc_err *err) QC_WARN_UNUSED;
int qc_gguf_get_number(const qc_gguf_file *file, const char *key, double absent, double *ret,
                       qc_err *err) QC_WARN_UNUSED;
int qc_gguf_get_bool(const qc_gguf_file *file, const char *key, bool absent, bool *ret,
                     qc_err *err) QC_WARN_UNUSED;
/* p NULL if there is no such key. */
int qc_gguf_get_text(const qc_gguf_file *file, const char *key, qc_gguf_text *ret,
                     qc_err *err) QC_WARN_UNUSED;
/* The array under a key; NULL if there is none, QC_E_INPUT if its elements are of another kind. */
int qc_gguf_get_array(const qc_gguf_file *file, const char *key, qc_gguf_kind kind, const qc_gguf_value **ret,
                      qc_err *err) QC_WARN_UNUSED;

/* Step through the strings of an array: *at starts as its data. */
qc_gguf_text qc_gguf_next_text(const uint8_t **at);

/* Is the text there and these bytes? */
bool qc_gguf_text_is(qc_gguf_text text, const char *want);

/* ---- writing ---- */

/* Head of a file in the making. Zero-initialise; keys and tensors may come in any order between each other,
 * keys must differ. */
typedef struct qc_gguf_head {
    qc_buf keys, tensors;
    uint64_t n_keys, n_tensors;
    uint64_t data_bytes; /* of the tensors so far, padding included */
} qc_gguf_head;

/* One key with its value: an integer of a kind, or BOOL with 0 or 1. */
int qc_gguf_put_int(qc_gguf_head *head, const char *key, qc_gguf_kind kind, int64_t value,
                    qc_err *err) QC_WARN_UNUSED;
/* A float32. */
int qc_gguf_put_f32(qc_gguf_head *head, const char *key, float value, qc_err *err) QC_WARN_UNUSED;
/* A string. */
int qc_gguf_put_text(qc_gguf_head *head, const char *key, const char *text, qc_err *err) QC_WARN_UNUSED;
/* An array of n_elems; `packed` holds them as they are stored (strings: qc_gguf_append_text). */
int qc_gguf_put_array(qc_gguf_head *head, const char *key, qc_gguf_kind kind, uint64_t n_elems,
                      const qc_buf *packed, qc_err *err) QC_WARN_UNUSED;
int qc_gguf_append_text(qc_buf *buf, const char *text, size_t n_bytes, qc_err *err) QC_WARN_UNUSED;

/* The next tensor, shape as stored (contiguous dimension first, a multiple of the type's block). */
int qc_gguf_put_tensor(qc_gguf_head *head, const char *name, const qc_block_info *type, int n_dims,
                       const int64_t *ne, qc_err *err) QC_WARN_UNUSED;

/* *out (empty) = the whole head up to where data begin. Every tensor's data are then padded with zeros to
 * QC_GGUF_ALIGNMENT. */
int qc_gguf_head_finish(const qc_gguf_head *head, qc_buf *out, qc_err *err) QC_WARN_UNUSED;
void qc_gguf_head_clear(qc_gguf_head *head);

#endif
