/* Byte positions of a qpk file, as in docs/formats/qpk.md. Read by the library and the writer, not installed.
 */
#ifndef QPK_FORMAT_H
#define QPK_FORMAT_H

#include <stdint.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "qpk files are mapped as they are: a little-endian processor is needed"
#endif

#define QPK_MAGIC "\x89QPK\r\n\x1a\n" /* 8 bytes; shows damage by text-mode transfers */

enum {
    QPK_HEADER_BYTES = 256,
    QPK_PAGE_BYTES = 4096, /* alignment of the data sections and of the first table */
    QPK_ALIGN_BYTES = 64,  /* alignment of tensors, side files and tables */
    QPK_MAX_NAME_BYTES = 4096
};

/* Header */
enum {
    QPK_H_MAGIC = 0,
    QPK_H_VERSION = 8,
    QPK_H_HEADER_BYTES = 12,
    QPK_H_REQUIRED = 16,
    QPK_H_OPTIONAL = 24,
    QPK_H_FILE_BYTES = 32,
    QPK_H_N_SECTIONS = 40,
    QPK_H_RESERVED1 = 44,
    QPK_H_SECTIONS = 48,
    QPK_H_RESERVED2 = 240, /* 12 bytes */
    QPK_H_CRC = 252        /* CRC-32 of bytes 0 .. 251 */
};

/* Entry of a section in the header */
enum { QPK_S_OFFSET = 0, QPK_S_BYTES = 8, QPK_S_COUNT = 16, QPK_S_CRC = 20, QPK_SECTION_BYTES = 24 };

/* Sections in the order of the file */
enum {
    QPK_SEC_TENSOR_DATA,
    QPK_SEC_FILE_DATA,
    QPK_SEC_STRINGS,
    QPK_SEC_META,
    QPK_SEC_VALUES,
    QPK_SEC_FILES,
    QPK_SEC_TENSORS,
    QPK_SEC_ALIASES,
    QPK_N_SECTIONS
};

/* Metadata record */
enum {
    QPK_M_KEY = 0,
    QPK_M_TYPE = 8,
    QPK_M_COUNT = 12,
    QPK_M_VALUE = 16,
    QPK_M_RESERVED = 24,
    QPK_META_BYTES = 32
};

/* Side file record */
enum {
    QPK_F_NAME = 0,
    QPK_F_METHOD = 8,
    QPK_F_CRC = 12,
    QPK_F_RAW_BYTES = 16,
    QPK_F_STORED_BYTES = 24,
    QPK_F_OFFSET = 32,
    QPK_F_RESERVED = 40,
    QPK_FILE_BYTES = 48
};

/* Tensor record */
enum {
    QPK_T_NAME = 0,
    QPK_T_DTYPE = 8,   /* u16 */
    QPK_T_N_DIMS = 10, /* u8 */
    QPK_T_LAYOUT = 11, /* u8: 0 dense, 1 tiles */
    QPK_T_CRC = 12,
    QPK_T_SHAPE = 16,
    QPK_T_OFFSET = 48,
    QPK_T_BYTES = 56,
    QPK_T_GRID = 64,        /* u8: 0 none, 1 affine */
    QPK_T_BITS = 65,        /* u8 */
    QPK_T_CODES = 66,       /* u8: 0 unsigned codes */
    QPK_T_FLAGS = 67,       /* u8: bit 0 zero points stored */
    QPK_T_SCALE_DTYPE = 68, /* u16 */
    QPK_T_ZERO_DTYPE = 70,  /* u16 */
    QPK_T_GROUP = 72,       /* u64 */
    QPK_T_TILE_BYTES = 80,
    QPK_T_SCALES = 88,
    QPK_T_ZEROS = 96,
    QPK_T_RESERVED1 = 104,  /* 8 bytes: minimum, super-scales */
    QPK_T_ACT_SCHEME = 112, /* u8: 0 inputs are not quantized, 2 dynamic per token */
    QPK_T_ACT_BITS = 113,   /* u8 */
    QPK_T_RESERVED2 = 114,  /* 2 bytes: input order */
    QPK_T_ACT_GROUP = 116,  /* u32 */
    QPK_T_RESERVED3 = 120,  /* 72 bytes */
    QPK_TENSOR_BYTES = 192
};

enum { QPK_TF_ZEROS = 1 };

/* Bits of `required`: what a reader must know to compute rightly with the file. */
enum { QPK_FEATURE_ACTS = 1 }; /* a tensor has an activation scheme */

enum { QPK_ACT_NONE = 0, QPK_ACT_DYNAMIC_TOKEN = 2 };

/* Alias record */
enum { QPK_A_NAME = 0, QPK_A_TARGET = 8, QPK_A_RESERVED = 12, QPK_ALIAS_BYTES = 16 };

/* A name is (u32 offset in the strings, u32 bytes without the NUL that follows). */

/* Inflated size that n_bytes of zlib data can not exceed (deflate reaches at most 1032:1). */
static inline uint64_t qpk_max_raw_bytes(uint64_t n_bytes)
{
    return n_bytes > UINT64_MAX / 2048 ? UINT64_MAX : n_bytes * 1032 + 1024;
}

/* Planes of a code of `bits` bits: widths 8, 4, 2, 1 that add up to it, low bits of the code in the widest
 * plane. Fills width and the bit of the code where each starts; returns their number (1 .. 3). */
static inline int qpk_planes(int bits, int width[3], int shift[3])
{
    int n = 0, low = 0;
    for (int w = 8; w >= 1; w /= 2)
        if (bits & w) {
            width[n] = w;
            shift[n++] = low;
            low += w;
        }
    return n;
}

#endif
