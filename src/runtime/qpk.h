/* libqpk: stand-alone reader of qpk files, the packed model format (docs/formats/qpk.md). C11 and zlib only,
 * so that any engine can embed it: open (memory map), list, find, map tiles, decode rows, check.
 *
 * Calling order: qpk_open, any number of the other functions from any number of threads, qpk_close. The file
 * must not be changed or cut while it is open. Everything returned by a getter belongs to the file object and
 * is valid until qpk_close.
 *
 * A function that can fail returns 0 or a negative QPK_E_* code and then writes one line (no newline, always
 * NUL-terminated, cut if too long) to err[err_bytes]; err may be NULL. Outputs are untouched on failure,
 * except that decoded rows may have been written in part. */
#ifndef QPK_H
#define QPK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define QPK_API __attribute__((visibility("default")))
#else
#define QPK_API
#endif

#define QPK_VERSION    0  /* of the format that this library reads */
#define QPK_TILE_ROWS  16 /* rows of a matrix that are packed together */
#define QPK_BLOCK_COLS 32 /* columns are padded to whole blocks */
#define QPK_MAX_DIMS   4

enum {
    QPK_OK = 0,
    QPK_E_USAGE = -2,       /* index or range outside the tensor, wrong kind of tensor */
    QPK_E_INPUT = -3,       /* missing or broken file */
    QPK_E_UNSUPPORTED = -4, /* well formed, but newer than this library */
    QPK_E_RESOURCE = -5     /* out of memory, can not map */
};

/* Element types, as stored. */
enum {
    QPK_F32 = 1,
    QPK_F16 = 2,
    QPK_BF16 = 3,
    QPK_F64 = 4,
    QPK_I8 = 5,
    QPK_U8 = 6,
    QPK_I16 = 7,
    QPK_U16 = 8,
    QPK_I32 = 9,
    QPK_U32 = 10,
    QPK_I64 = 11,
    QPK_U64 = 12,
    QPK_BOOL = 13,
    QPK_F8_E4M3 = 14,
    QPK_F8_E5M2 = 15,
    QPK_F8_E8M0 = 16,
    QPK_F8_E4M3FNUZ = 17,
    QPK_F8_E5M2FNUZ = 18,
    QPK_GRID = 64 /* integer codes with scales */
};

/* "BF16", "GRID"; "?" for an unknown id. Static storage. */
QPK_API const char *qpk_dtype_name(unsigned dtype);

/* Place of everything inside a matrix on a grid. All offsets are in bytes from the start of a tile. */
typedef struct qpk_layout {
    int64_t n_tiles;        /* ceil(rows / 16) */
    int64_t n_blocks;       /* ceil(cols / 32); a block is 16 rows x 32 columns in 64 * bits bytes */
    int64_t n_groups;       /* ceil(cols / group_elems) */
    uint64_t tile_bytes;    /* from one tile to the next, a multiple of 64 */
    uint64_t scales_offset; /* scales [n_groups][16] in the scale type; codes start at 0 */
    uint64_t zeros_offset;  /* zero points [n_groups][16] of one byte; 0 if the grid is symmetric */
} qpk_layout;

typedef struct qpk_tensor {
    const char *name;
    unsigned dtype; /* QPK_GRID or the type of a dense tensor, which is stored row by row as it is */
    int n_dims;
    int64_t shape[QPK_MAX_DIMS];
    int64_t rows, cols; /* the tensor as a matrix: cols = last dimension (1 for rank 0) */
    uint64_t offset;    /* in the file, a multiple of 64 */
    uint64_t n_bytes;
    uint32_t crc32;
    /* Tensors on a grid only, else 0: value = scale * (code - zero). */
    int bits;             /* 1 .. 8; codes are unsigned */
    int symmetric;        /* 1: every zero point is 2^(bits - 1) and none is stored */
    unsigned scale_dtype; /* QPK_F16, QPK_BF16 or QPK_F32 */
    int64_t group_elems;  /* columns that share a scale: a multiple of 4, or = cols */
    qpk_layout layout;
    /* Inputs are rounded while running to a symmetric grid of act_bits bits, step max |x| / (2^(act_bits - 1)
     * - 1) per token and act_group columns (0 = the whole token). act_bits 0: they are used as they are. */
    int act_bits;
    int64_t act_group;
} qpk_tensor;

/* Layout of a matrix [rows, cols] on a grid; what a writer uses too. QPK_E_INPUT: impossible grid or too
 * large. */
QPK_API int qpk_layout_make(int64_t rows, int64_t cols, int bits, int symmetric, unsigned scale_dtype,
                            int64_t group_elems, qpk_layout *ret, char *err, size_t err_bytes);

typedef struct qpk_file qpk_file;

/* Map a file and check header, tables and every offset and size, but not the checksums of tensors and side
 * files. */
QPK_API int qpk_open(const char *path, qpk_file **ret, char *err, size_t err_bytes);

/* The same over n_bytes of memory that the caller keeps alive and unchanged; 64-byte aligned for aligned
 * tensors. `name` is for messages. */
QPK_API int qpk_open_memory(const void *data, size_t n_bytes, const char *name, qpk_file **ret, char *err,
                            size_t err_bytes);

/* NULL is fine. */
QPK_API void qpk_close(qpk_file *file);

/* Compare every tensor and side file with its CRC-32; QPK_E_INPUT names the first damaged one. Reads the
 * whole file and gives its pages back as it goes. */
QPK_API int qpk_check(const qpk_file *file, char *err, size_t err_bytes);

/* ---- tensors ---- */

/* Number of tensors, aliases left out. */
QPK_API int64_t qpk_n_tensors(const qpk_file *file);
/* NULL if the index is out of range. */
QPK_API const qpk_tensor *qpk_tensor_at(const qpk_file *file, int64_t tensor);
/* Index of a tensor by its name or an alias of it, -1 if there is none. */
QPK_API int64_t qpk_find(const qpk_file *file, const char *name);

/* Aliases: further names of a tensor (a tied output head). NULL / -1 if out of range. */
QPK_API int64_t qpk_n_aliases(const qpk_file *file);
QPK_API const char *qpk_alias_name(const qpk_file *file, int64_t alias);
QPK_API int64_t qpk_alias_target(const qpk_file *file, int64_t alias);

/* First byte of a tensor's data in the map; tile t of a matrix on a grid starts layout.tile_bytes * t further
 * on. NULL if the index is out of range. */
QPK_API const void *qpk_tensor_data(const qpk_file *file, int64_t tensor);

/* dst[n_rows, cols] = values of rows row0 .. row0 + n_rows - 1 as float32. QPK_E_UNSUPPORTED: a dense type
 * that is no number (F8 ...). Fastest for whole tiles. */
QPK_API int qpk_dequantize_rows(const qpk_file *file, int64_t tensor, int64_t row0, int64_t n_rows,
                                float *dst, char *err, size_t err_bytes);

/* Codes [n_rows, cols], scales [n_rows, n_groups] and zero points [n_rows, n_groups] (zeros is not touched
 * and may be NULL if the grid is symmetric) of some rows of a tensor on a grid. QPK_E_USAGE for a dense one.
 */
QPK_API int qpk_unpack_rows(const qpk_file *file, int64_t tensor, int64_t row0, int64_t n_rows,
                            uint8_t *codes, float *scales, uint8_t *zeros, char *err, size_t err_bytes);

/* The rows will not be needed soon: give their pages back to the system (all but the last one, which the next
 * rows may share); a later access reads them again. No effect on qpk_open_memory files or bad ranges. */
QPK_API void qpk_release(const qpk_file *file, int64_t tensor, int64_t row0, int64_t n_rows);

/* ---- metadata ---- */

enum {
    QPK_META_U64 = 1,
    QPK_META_I64 = 2,
    QPK_META_F64 = 3,
    QPK_META_STRING = 4,
    QPK_META_U64_ARRAY = 17,
    QPK_META_I64_ARRAY = 18,
    QPK_META_F64_ARRAY = 19
};

typedef struct qpk_meta {
    const char *key;
    unsigned type;    /* QPK_META_* */
    uint32_t n_elems; /* of an array; 1 for a number, bytes without the NUL for a string */
    union {
        uint64_t u64;
        int64_t i64;
        double f64;
        const char *string;
        const uint64_t *u64_array; /* 8-byte aligned */
        const int64_t *i64_array;
        const double *f64_array;
    } value;
} qpk_meta;

/* Number of metadata entries. */
QPK_API int64_t qpk_n_meta(const qpk_file *file);
/* In file order; NULL if out of range. */
QPK_API const qpk_meta *qpk_meta_at(const qpk_file *file, int64_t index);
/* By key, NULL if there is none. */
QPK_API const qpk_meta *qpk_meta_find(const qpk_file *file, const char *key);

/* A value of the named type, or `absent` if the key is missing or of another type. */
QPK_API uint64_t qpk_meta_u64(const qpk_file *file, const char *key, uint64_t absent);
QPK_API int64_t qpk_meta_i64(const qpk_file *file, const char *key, int64_t absent);
QPK_API double qpk_meta_f64(const qpk_file *file, const char *key, double absent);
QPK_API const char *qpk_meta_string(const qpk_file *file, const char *key, const char *absent);

/* ---- side files ---- */

typedef struct qpk_side_file {
    const char *name;
    uint64_t raw_bytes;    /* after inflating */
    uint64_t stored_bytes; /* in the qpk file */
    uint64_t offset;
    uint32_t crc32; /* of the stored bytes */
    int method;     /* 0 as it is, 1 zlib */
} qpk_side_file;

/* Number of side files. */
QPK_API int64_t qpk_n_files(const qpk_file *file);
/* NULL if out of range. */
QPK_API const qpk_side_file *qpk_file_at(const qpk_file *file, int64_t index);
/* Index by name ("tokenizer.json"), -1 if there is none. */
QPK_API int64_t qpk_file_find(const qpk_file *file, const char *name);
/* Write the raw_bytes of a side file to dst, checksum compared. */
QPK_API int qpk_file_read(const qpk_file *file, int64_t index, void *dst, char *err, size_t err_bytes);

#ifdef __cplusplus
}
#endif
#endif
