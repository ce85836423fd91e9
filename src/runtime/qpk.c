#include "qpk_internal.h"

#include "qpk_format.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define ZLIB_CONST
#include <zlib.h>

int qpk_fail(char *err, size_t err_bytes, int code, const char *fmt, ...)
{
    if (!err || err_bytes == 0)
        return code;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err, err_bytes, fmt, ap);
    va_end(ap);
    for (char *p = err; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f)
            *p = '?';
    return code;
}

static const struct {
    unsigned dtype;
    const char *name;
    int bits;
} dtypes[] = {
    {QPK_F32, "F32", 32},
    {QPK_F16, "F16", 16},
    {QPK_BF16, "BF16", 16},
    {QPK_F64, "F64", 64},
    {QPK_I8, "I8", 8},
    {QPK_U8, "U8", 8},
    {QPK_I16, "I16", 16},
    {QPK_U16, "U16", 16},
    {QPK_I32, "I32", 32},
    {QPK_U32, "U32", 32},
    {QPK_I64, "I64", 64},
    {QPK_U64, "U64", 64},
    {QPK_BOOL, "BOOL", 8},
    {QPK_F8_E4M3, "F8_E4M3", 8},
    {QPK_F8_E5M2, "F8_E5M2", 8},
    {QPK_F8_E8M0, "F8_E8M0", 8},
    {QPK_F8_E4M3FNUZ, "F8_E4M3FNUZ", 8},
    {QPK_F8_E5M2FNUZ, "F8_E5M2FNUZ", 8},
    {QPK_GRID, "GRID", 0},
};

const char *qpk_dtype_name(unsigned dtype)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
        if (dtypes[i].dtype == dtype)
            return dtypes[i].name;
    return "?";
}

int qpk_dtype_bits(unsigned dtype)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
        if (dtypes[i].dtype == dtype)
            return dtypes[i].bits;
    return 0;
}

/* ---- layout ---- */

int qpk_layout_make(int64_t rows, int64_t cols, int bits, int symmetric, unsigned scale_dtype,
                    int64_t group_elems, qpk_layout *ret, char *err, size_t err_bytes)
{
    const int64_t limit = (int64_t)1 << 40; /* keeps every product below 2^63 */
    if (rows < 1 || cols < 1 || rows > limit || cols > limit)
        return qpk_fail(err, err_bytes, QPK_E_INPUT, "shape [%lld, %lld] can not be put on a grid",
                        (long long)rows, (long long)cols);
    if (bits < 1 || bits > 8)
        return qpk_fail(err, err_bytes, QPK_E_INPUT, "%d bits per code, expected 1 to 8", bits);
    if (scale_dtype != QPK_F16 && scale_dtype != QPK_BF16 && scale_dtype != QPK_F32)
        return qpk_fail(err, err_bytes, QPK_E_INPUT, "scale type %u, expected F16, BF16 or F32", scale_dtype);
    if (group_elems != cols && (group_elems < 4 || group_elems % 4 != 0 || group_elems > cols))
        return qpk_fail(err, err_bytes, QPK_E_INPUT,
                        "groups of %lld columns, expected a multiple of 4 up to %lld or all columns",
                        (long long)group_elems, (long long)cols);
    qpk_layout lay = {.n_tiles = (rows + QPK_TILE_ROWS - 1) / QPK_TILE_ROWS,
                      .n_blocks = (cols + QPK_BLOCK_COLS - 1) / QPK_BLOCK_COLS,
                      .n_groups = (cols + group_elems - 1) / group_elems};
    uint64_t group_row_bytes = QPK_TILE_ROWS * (uint64_t)(qpk_dtype_bits(scale_dtype) / 8);
    lay.scales_offset = (uint64_t)lay.n_blocks * 64 * (uint64_t)bits;
    uint64_t end = lay.scales_offset + (uint64_t)lay.n_groups * group_row_bytes;
    if (!symmetric) {
        lay.zeros_offset = end;
        end += (uint64_t)lay.n_groups * QPK_TILE_ROWS;
    }
    lay.tile_bytes = (end + QPK_ALIGN_BYTES - 1) / QPK_ALIGN_BYTES * QPK_ALIGN_BYTES;
    if (lay.tile_bytes > (uint64_t)INT64_MAX / (uint64_t)lay.n_tiles)
        return qpk_fail(err, err_bytes, QPK_E_INPUT, "shape [%lld, %lld] is too large", (long long)rows,
                        (long long)cols);
    *ret = lay;
    return QPK_OK;
}

/* ---- parsing ---- */

/* What the parsing functions share: the file so far, where the next data may begin, and the place for a
 * message. */
typedef struct parse {
    qpk_file *file;
    qpk_section sections[QPK_N_SECTIONS];
    uint64_t required;
    char *err;
    size_t err_bytes;
} parse;

#define FAIL(p, code, ...) fail_in((p)->file, (p)->err, (p)->err_bytes, code, __VA_ARGS__)

static int fail_in(const qpk_file *file, char *err, size_t err_bytes, int code, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));

static int fail_in(const qpk_file *file, char *err, size_t err_bytes, int code, const char *fmt, ...)
{
    char text[768];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return qpk_fail(err, err_bytes, code, "%s: %s", file->path, text);
}

static const char *const section_names[QPK_N_SECTIONS] = {"tensor data", "file data", "strings", "metadata",
                                                          "values",      "files",     "tensors", "aliases"};
static const unsigned record_bytes[QPK_N_SECTIONS] = {
    0, 0, 1, QPK_META_BYTES, 8, QPK_FILE_BYTES, QPK_TENSOR_BYTES, QPK_ALIAS_BYTES};

static bool is_zero(const uint8_t *bytes, size_t n_bytes)
{
    uint8_t any = 0;
    for (size_t i = 0; i < n_bytes; i++)
        any |= bytes[i];
    return any == 0;
}

static int parse_section(parse *p, int s, uint64_t *cursor)
{
    const uint8_t *entry = p->file->data + QPK_H_SECTIONS + s * QPK_SECTION_BYTES;
    qpk_section sec = {.offset = qpk_u64(entry + QPK_S_OFFSET),
                       .n_bytes = qpk_u64(entry + QPK_S_BYTES),
                       .count = qpk_u32(entry + QPK_S_COUNT),
                       .crc32 = qpk_u32(entry + QPK_S_CRC)};
    const char *name = section_names[s];
    uint64_t align = s <= QPK_SEC_STRINGS ? QPK_PAGE_BYTES : QPK_ALIGN_BYTES;
    if (sec.offset % align != 0)
        return FAIL(p, QPK_E_INPUT, "section of %s starts at byte %llu, expected a multiple of %llu", name,
                    (unsigned long long)sec.offset, (unsigned long long)align);
    if (sec.offset < *cursor || sec.offset > p->file->n_bytes || sec.n_bytes > p->file->n_bytes - sec.offset)
        return FAIL(p, QPK_E_INPUT,
                    "section of %s (%llu bytes at %llu) is outside the file or overlaps another", name,
                    (unsigned long long)sec.n_bytes, (unsigned long long)sec.offset);
    if (record_bytes[s] && sec.n_bytes != (uint64_t)sec.count * record_bytes[s])
        return FAIL(p, QPK_E_INPUT, "section of %s has %llu bytes, expected %u records of %u bytes", name,
                    (unsigned long long)sec.n_bytes, sec.count, record_bytes[s]);
    *cursor = sec.offset + sec.n_bytes;
    p->sections[s] = sec;
    return QPK_OK;
}

static int parse_header(parse *p)
{
    const uint8_t *h = p->file->data;
    uint64_t n_bytes = p->file->n_bytes;
    if (n_bytes < QPK_HEADER_BYTES || memcmp(h, QPK_MAGIC, 8) != 0)
        return FAIL(p, QPK_E_INPUT, "is not a qpk file (%s)",
                    n_bytes < QPK_HEADER_BYTES ? "too short" : "wrong magic");
    if (qpk_u32(h + QPK_H_VERSION) != QPK_VERSION)
        return FAIL(p, QPK_E_UNSUPPORTED, "format version %u, this library reads version %d",
                    qpk_u32(h + QPK_H_VERSION), QPK_VERSION);
    uint32_t crc = (uint32_t)crc32_z(0, h, QPK_H_CRC);
    if (crc != qpk_u32(h + QPK_H_CRC))
        return FAIL(p, QPK_E_INPUT, "header is damaged (checksum %08x, expected %08x)", crc,
                    qpk_u32(h + QPK_H_CRC));
    p->required = qpk_u64(h + QPK_H_REQUIRED);
    if (p->required & ~(uint64_t)QPK_FEATURE_ACTS)
        return FAIL(p, QPK_E_UNSUPPORTED, "needs features 0x%llx that this library does not know",
                    (unsigned long long)(p->required & ~(uint64_t)QPK_FEATURE_ACTS));
    if (qpk_u32(h + QPK_H_HEADER_BYTES) != QPK_HEADER_BYTES ||
        qpk_u32(h + QPK_H_N_SECTIONS) != QPK_N_SECTIONS)
        return FAIL(p, QPK_E_INPUT, "header of %u bytes with %u sections, expected %d and %d",
                    qpk_u32(h + QPK_H_HEADER_BYTES), qpk_u32(h + QPK_H_N_SECTIONS), QPK_HEADER_BYTES,
                    QPK_N_SECTIONS);
    if (qpk_u32(h + QPK_H_RESERVED1) != 0 || !is_zero(h + QPK_H_RESERVED2, QPK_H_CRC - QPK_H_RESERVED2))
        return FAIL(p, QPK_E_UNSUPPORTED, "reserved field of the header is not zero");
    if (qpk_u64(h + QPK_H_FILE_BYTES) != n_bytes)
        return FAIL(p, QPK_E_INPUT, "file has %llu bytes, its header says %llu (cut short?)",
                    (unsigned long long)n_bytes, (unsigned long long)qpk_u64(h + QPK_H_FILE_BYTES));
    uint64_t cursor = QPK_PAGE_BYTES;
    for (int s = 0; s < QPK_N_SECTIONS; s++) {
        int rc = parse_section(p, s, &cursor);
        if (rc < 0)
            return rc;
    }
    if (cursor != n_bytes)
        return FAIL(p, QPK_E_INPUT, "last section ends at byte %llu of %llu", (unsigned long long)cursor,
                    (unsigned long long)n_bytes);
    return QPK_OK;
}

static int check_tables(parse *p)
{
    for (int s = QPK_SEC_STRINGS; s < QPK_N_SECTIONS; s++) {
        qpk_section sec = p->sections[s];
        uint32_t crc = (uint32_t)crc32_z(0, p->file->data + sec.offset, sec.n_bytes);
        if (crc != sec.crc32)
            return FAIL(p, QPK_E_INPUT, "section of %s is damaged (checksum %08x, expected %08x)",
                        section_names[s], crc, sec.crc32);
    }
    return QPK_OK;
}

/* String of n_bytes with a NUL behind it and none inside. */
static const char *string_at(const parse *p, uint32_t offset, uint32_t n_bytes)
{
    const qpk_file *f = p->file;
    if (offset >= f->strings_bytes || n_bytes >= f->strings_bytes - offset)
        return NULL;
    const char *s = f->strings + offset;
    return s[n_bytes] == 0 && !memchr(s, 0, n_bytes) ? s : NULL;
}

static int parse_name(const parse *p, const uint8_t *rec, const char *what, int64_t i, const char **ret)
{
    uint32_t n_bytes = qpk_u32(rec + 4);
    const char *s = string_at(p, qpk_u32(rec), n_bytes);
    if (!s || n_bytes == 0 || n_bytes > QPK_MAX_NAME_BYTES)
        return FAIL(p, QPK_E_INPUT, "%s %lld has no proper name", what, (long long)i);
    for (const char *c = s; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            return FAIL(p, QPK_E_INPUT, "%s %lld has a control character in its name", what, (long long)i);
    *ret = s;
    return QPK_OK;
}

static int parse_meta(parse *p, int64_t i, const uint8_t *rec, qpk_meta *ret)
{
    const qpk_file *f = p->file;
    qpk_meta m = {.type = qpk_u32(rec + QPK_M_TYPE), .n_elems = qpk_u32(rec + QPK_M_COUNT)};
    uint64_t value = qpk_u64(rec + QPK_M_VALUE);
    int rc = parse_name(p, rec + QPK_M_KEY, "metadata key", i, &m.key);
    if (rc < 0)
        return rc;
    switch (m.type) {
    case QPK_META_U64:
    case QPK_META_I64:
    case QPK_META_F64:
        if (m.n_elems != 1)
            return FAIL(p, QPK_E_INPUT, "metadata '%s': %u numbers, expected 1", m.key, m.n_elems);
        m.value.u64 = value;
        break;
    case QPK_META_STRING:
        m.value.string = value <= UINT32_MAX ? string_at(p, (uint32_t)value, m.n_elems) : NULL;
        if (!m.value.string)
            return FAIL(p, QPK_E_INPUT, "metadata '%s': text lies outside the strings", m.key);
        break;
    case QPK_META_U64_ARRAY:
    case QPK_META_I64_ARRAY:
    case QPK_META_F64_ARRAY:
        if (value % 8 != 0 || value > f->values_bytes || m.n_elems > (f->values_bytes - value) / 8)
            return FAIL(p, QPK_E_INPUT, "metadata '%s': array lies outside the values", m.key);
        m.value.u64_array = (const uint64_t *)(const void *)(f->values + value);
        break;
    default:
        return FAIL(p, QPK_E_UNSUPPORTED, "metadata '%s': unknown type %u", m.key, m.type);
    }
    if (!is_zero(rec + QPK_M_RESERVED, QPK_META_BYTES - QPK_M_RESERVED))
        return FAIL(p, QPK_E_UNSUPPORTED, "metadata '%s': reserved field is not zero", m.key);
    *ret = m;
    return QPK_OK;
}

/* Data of a tensor or side file: aligned, inside its section, behind the one before it. */
static int check_extent(const parse *p, int section, const char *what, const char *name, uint64_t offset,
                        uint64_t n_bytes, uint64_t *cursor)
{
    qpk_section sec = p->sections[section];
    uint64_t end = sec.offset + sec.n_bytes;
    if (offset % QPK_ALIGN_BYTES != 0)
        return FAIL(p, QPK_E_INPUT, "%s '%s' starts at byte %llu, expected a multiple of %d", what, name,
                    (unsigned long long)offset, QPK_ALIGN_BYTES);
    if (offset < *cursor || offset > end || n_bytes > end - offset)
        return FAIL(p, QPK_E_INPUT, "%s '%s' (%llu bytes at %llu) is outside its section or overlaps another",
                    what, name, (unsigned long long)n_bytes, (unsigned long long)offset);
    *cursor = offset + n_bytes;
    return QPK_OK;
}

static int parse_side_file(parse *p, int64_t i, const uint8_t *rec, qpk_side_file *ret, uint64_t *cursor)
{
    qpk_side_file s = {.method = 0,
                       .crc32 = qpk_u32(rec + QPK_F_CRC),
                       .raw_bytes = qpk_u64(rec + QPK_F_RAW_BYTES),
                       .stored_bytes = qpk_u64(rec + QPK_F_STORED_BYTES),
                       .offset = qpk_u64(rec + QPK_F_OFFSET)};
    uint32_t method = qpk_u32(rec + QPK_F_METHOD);
    int rc = parse_name(p, rec + QPK_F_NAME, "side file", i, &s.name);
    if (rc < 0)
        return rc;
    if (method > 1)
        return FAIL(p, QPK_E_UNSUPPORTED, "side file '%s': unknown compression %u", s.name, method);
    s.method = (int)method;
    if (!is_zero(rec + QPK_F_RESERVED, QPK_FILE_BYTES - QPK_F_RESERVED))
        return FAIL(p, QPK_E_UNSUPPORTED, "side file '%s': reserved field is not zero", s.name);
    rc = check_extent(p, QPK_SEC_FILE_DATA, "side file", s.name, s.offset, s.stored_bytes, cursor);
    if (rc < 0)
        return rc;
    if (method == 0 ? s.raw_bytes != s.stored_bytes : s.raw_bytes > qpk_max_raw_bytes(s.stored_bytes))
        return FAIL(p, QPK_E_INPUT, "side file '%s': %llu bytes can not come from %llu stored bytes", s.name,
                    (unsigned long long)s.raw_bytes, (unsigned long long)s.stored_bytes);
    *ret = s;
    return QPK_OK;
}

static int parse_shape(parse *p, const uint8_t *rec, qpk_tensor *t)
{
    const int64_t limit = (int64_t)1 << 48;
    int64_t n_elems = 1;
    t->n_dims = rec[QPK_T_N_DIMS];
    if (t->n_dims > QPK_MAX_DIMS)
        return FAIL(p, QPK_E_INPUT, "tensor '%s': %d dimensions, at most %d are possible", t->name, t->n_dims,
                    QPK_MAX_DIMS);
    t->rows = t->cols = 1;
    for (int d = 0; d < QPK_MAX_DIMS; d++) {
        uint64_t n = qpk_u64(rec + QPK_T_SHAPE + 8 * d);
        if (d >= t->n_dims ? n != 0 : n > (uint64_t)limit)
            return FAIL(p, QPK_E_INPUT, "tensor '%s': dimension %d is %llu", t->name, d,
                        (unsigned long long)n);
        if (d >= t->n_dims)
            continue;
        t->shape[d] = (int64_t)n;
        if (n != 0 && n_elems > limit / (int64_t)n)
            return FAIL(p, QPK_E_INPUT, "tensor '%s': more than 2^48 elements", t->name);
        n_elems *= (int64_t)n;
    }
    if (t->n_dims)
        t->cols = t->shape[t->n_dims - 1];
    t->rows = t->cols ? n_elems / t->cols : 0;
    return QPK_OK;
}

static int parse_dense(parse *p, const uint8_t *rec, const qpk_tensor *t)
{
    int bits = qpk_dtype_bits(t->dtype);
    if (bits == 0)
        return FAIL(p, QPK_E_UNSUPPORTED, "tensor '%s': unknown element type %u", t->name, t->dtype);
    if (rec[QPK_T_LAYOUT] != 0 || !is_zero(rec + QPK_T_GRID, QPK_TENSOR_BYTES - QPK_T_GRID))
        return FAIL(p, QPK_E_UNSUPPORTED, "tensor '%s': grid fields are set in a dense tensor", t->name);
    uint64_t expected = (uint64_t)t->rows * (uint64_t)t->cols * (uint64_t)(bits / 8);
    if (t->n_bytes != expected)
        return FAIL(p, QPK_E_INPUT, "tensor '%s': %llu bytes, expected %llu for its shape and type", t->name,
                    (unsigned long long)t->n_bytes, (unsigned long long)expected);
    return QPK_OK;
}

static int parse_acts(parse *p, const uint8_t *rec, qpk_tensor *t)
{
    int scheme = rec[QPK_T_ACT_SCHEME], bits = rec[QPK_T_ACT_BITS];
    uint32_t group = qpk_u32(rec + QPK_T_ACT_GROUP);
    if (scheme != QPK_ACT_NONE && scheme != QPK_ACT_DYNAMIC_TOKEN)
        return FAIL(p, QPK_E_UNSUPPORTED, "tensor '%s': activation scheme %d is unknown to this library",
                    t->name, scheme);
    if (scheme == QPK_ACT_NONE) {
        if (bits == 0 && group == 0)
            return QPK_OK;
        return FAIL(p, QPK_E_INPUT, "tensor '%s': fields of an activation scheme are set without one",
                    t->name);
    }
    if (!(p->required & QPK_FEATURE_ACTS))
        return FAIL(p, QPK_E_INPUT, "tensor '%s' has an activation scheme, the header does not say so",
                    t->name);
    if (bits < 2 || bits > 8 || group % QPK_BLOCK_COLS != 0 || (group != 0 && group >= t->cols))
        return FAIL(
            p, QPK_E_INPUT,
            "tensor '%s': activations of %d bits in groups of %u, expected 2 to 8 bits and a multiple "
            "of %d below %lld",
            t->name, bits, group, QPK_BLOCK_COLS, (long long)t->cols);
    t->act_bits = bits;
    t->act_group = group;
    return QPK_OK;
}

static int parse_grid(parse *p, const uint8_t *rec, qpk_tensor *t)
{
    if (rec[QPK_T_LAYOUT] != 1 || rec[QPK_T_GRID] != 1 || rec[QPK_T_CODES] != 0 ||
        (rec[QPK_T_FLAGS] & ~QPK_TF_ZEROS) != 0 ||
        !is_zero(rec + QPK_T_RESERVED1, QPK_T_ACT_SCHEME - QPK_T_RESERVED1) ||
        !is_zero(rec + QPK_T_RESERVED2, QPK_T_ACT_GROUP - QPK_T_RESERVED2) ||
        !is_zero(rec + QPK_T_RESERVED3, QPK_TENSOR_BYTES - QPK_T_RESERVED3))
        return FAIL(p, QPK_E_UNSUPPORTED,
                    "tensor '%s': layout %d, grid %d, codes %d, flags %d or a reserved field is "
                    "unknown to this library",
                    t->name, rec[QPK_T_LAYOUT], rec[QPK_T_GRID], rec[QPK_T_CODES], rec[QPK_T_FLAGS]);
    uint64_t group = qpk_u64(rec + QPK_T_GROUP);
    unsigned zero_dtype = qpk_u16(rec + QPK_T_ZERO_DTYPE);
    t->bits = rec[QPK_T_BITS];
    t->symmetric = !(rec[QPK_T_FLAGS] & QPK_TF_ZEROS);
    t->scale_dtype = qpk_u16(rec + QPK_T_SCALE_DTYPE);
    t->group_elems = group <= INT64_MAX ? (int64_t)group : -1;
    if (zero_dtype != (t->symmetric ? 0 : QPK_U8))
        return FAIL(p, QPK_E_INPUT, "tensor '%s': zero points of type %u", t->name, zero_dtype);
    char text[256];
    int rc = qpk_layout_make(t->rows, t->cols, t->bits, t->symmetric, t->scale_dtype, t->group_elems,
                             &t->layout, text, sizeof text);
    if (rc < 0)
        return FAIL(p, rc, "tensor '%s': %s", t->name, text);
    const qpk_layout *lay = &t->layout;
    if (qpk_u64(rec + QPK_T_TILE_BYTES) != lay->tile_bytes ||
        qpk_u64(rec + QPK_T_SCALES) != lay->scales_offset ||
        qpk_u64(rec + QPK_T_ZEROS) != lay->zeros_offset ||
        t->n_bytes != lay->tile_bytes * (uint64_t)lay->n_tiles)
        return FAIL(p, QPK_E_INPUT,
                    "tensor '%s': sizes do not fit its shape and grid (expected %lld tiles of %llu "
                    "bytes, scales at %llu, zeros at %llu)",
                    t->name, (long long)lay->n_tiles, (unsigned long long)lay->tile_bytes,
                    (unsigned long long)lay->scales_offset, (unsigned long long)lay->zeros_offset);
    return parse_acts(p, rec, t);
}

static int parse_tensor(parse *p, int64_t i, const uint8_t *rec, qpk_tensor *ret, uint64_t *cursor)
{
    qpk_tensor t = {.dtype = qpk_u16(rec + QPK_T_DTYPE),
                    .offset = qpk_u64(rec + QPK_T_OFFSET),
                    .n_bytes = qpk_u64(rec + QPK_T_BYTES),
                    .crc32 = qpk_u32(rec + QPK_T_CRC)};
    int rc = parse_name(p, rec + QPK_T_NAME, "tensor", i, &t.name);
    if (rc == QPK_OK)
        rc = parse_shape(p, rec, &t);
    if (rc == QPK_OK)
        rc = t.dtype == QPK_GRID ? parse_grid(p, rec, &t) : parse_dense(p, rec, &t);
    if (rc == QPK_OK)
        rc = check_extent(p, QPK_SEC_TENSOR_DATA, "tensor", t.name, t.offset, t.n_bytes, cursor);
    if (rc == QPK_OK)
        *ret = t;
    return rc;
}

static int parse_alias(parse *p, int64_t i, const uint8_t *rec, qpk_alias *ret)
{
    qpk_alias a = {.target = qpk_u32(rec + QPK_A_TARGET)};
    int rc = parse_name(p, rec + QPK_A_NAME, "alias", i, &a.name);
    if (rc < 0)
        return rc;
    if (a.target >= p->file->n_tensors || qpk_u32(rec + QPK_A_RESERVED) != 0)
        return FAIL(p, QPK_E_INPUT, "alias '%s' names tensor %lld of %lld", a.name, (long long)a.target,
                    (long long)p->file->n_tensors);
    *ret = a;
    return QPK_OK;
}

/* Zeroed array of at least one element. */
static void *new_array(parse *p, uint64_t n_elems, size_t elem_bytes)
{
    void *array = calloc(n_elems ? n_elems : 1, elem_bytes);
    if (!array)
        FAIL(p, QPK_E_RESOURCE, "out of memory for its tables");
    return array;
}

static int parse_tables(parse *p)
{
    qpk_file *f = p->file;
    const qpk_section *sec = p->sections;
    f->strings = (const char *)f->data + sec[QPK_SEC_STRINGS].offset;
    f->strings_bytes = sec[QPK_SEC_STRINGS].n_bytes;
    f->values = f->data + sec[QPK_SEC_VALUES].offset;
    f->values_bytes = sec[QPK_SEC_VALUES].n_bytes;
    f->n_metas = sec[QPK_SEC_META].count;
    f->n_files = sec[QPK_SEC_FILES].count;
    f->n_tensors = sec[QPK_SEC_TENSORS].count;
    f->n_aliases = sec[QPK_SEC_ALIASES].count;
    if (!(f->metas = new_array(p, sec[QPK_SEC_META].count, sizeof *f->metas)) ||
        !(f->files = new_array(p, sec[QPK_SEC_FILES].count, sizeof *f->files)) ||
        !(f->tensors = new_array(p, sec[QPK_SEC_TENSORS].count, sizeof *f->tensors)) ||
        !(f->aliases = new_array(p, sec[QPK_SEC_ALIASES].count, sizeof *f->aliases)))
        return QPK_E_RESOURCE;
    int rc = QPK_OK;
    for (int64_t i = 0; rc == QPK_OK && i < f->n_metas; i++)
        rc = parse_meta(p, i, f->data + sec[QPK_SEC_META].offset + i * QPK_META_BYTES, &f->metas[i]);
    uint64_t cursor = sec[QPK_SEC_FILE_DATA].offset;
    for (int64_t i = 0; rc == QPK_OK && i < f->n_files; i++)
        rc = parse_side_file(p, i, f->data + sec[QPK_SEC_FILES].offset + i * QPK_FILE_BYTES, &f->files[i],
                             &cursor);
    cursor = sec[QPK_SEC_TENSOR_DATA].offset;
    for (int64_t i = 0; rc == QPK_OK && i < f->n_tensors; i++)
        rc = parse_tensor(p, i, f->data + sec[QPK_SEC_TENSORS].offset + i * QPK_TENSOR_BYTES, &f->tensors[i],
                          &cursor);
    for (int64_t i = 0; rc == QPK_OK && i < f->n_aliases; i++)
        rc = parse_alias(p, i, f->data + sec[QPK_SEC_ALIASES].offset + i * QPK_ALIAS_BYTES, &f->aliases[i]);
    return rc;
}

/* ---- names ---- */

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const qpk_name *)a)->name, ((const qpk_name *)b)->name);
}

/* Sort an index whose entries are filled; a name that occurs twice is an error. */
static int index_finish(parse *p, qpk_index *index, const char *what)
{
    qsort(index->entries, (size_t)index->n_entries, sizeof *index->entries, compare_names);
    for (int64_t i = 1; i < index->n_entries; i++)
        if (strcmp(index->entries[i - 1].name, index->entries[i].name) == 0)
            return FAIL(p, QPK_E_INPUT, "%s '%s' occurs twice", what, index->entries[i].name);
    return QPK_OK;
}

static int index_all(parse *p)
{
    qpk_file *f = p->file;
    if (!(f->tensor_index.entries =
              new_array(p, (uint64_t)(f->n_tensors + f->n_aliases), sizeof(qpk_name))) ||
        !(f->meta_index.entries = new_array(p, (uint64_t)f->n_metas, sizeof(qpk_name))) ||
        !(f->file_index.entries = new_array(p, (uint64_t)f->n_files, sizeof(qpk_name))))
        return QPK_E_RESOURCE;
    for (int64_t i = 0; i < f->n_tensors; i++)
        f->tensor_index.entries[f->tensor_index.n_entries++] = (qpk_name){f->tensors[i].name, i};
    for (int64_t i = 0; i < f->n_aliases; i++)
        f->tensor_index.entries[f->tensor_index.n_entries++] =
            (qpk_name){f->aliases[i].name, f->aliases[i].target};
    for (int64_t i = 0; i < f->n_metas; i++)
        f->meta_index.entries[f->meta_index.n_entries++] = (qpk_name){f->metas[i].key, i};
    for (int64_t i = 0; i < f->n_files; i++)
        f->file_index.entries[f->file_index.n_entries++] = (qpk_name){f->files[i].name, i};
    int rc = index_finish(p, &f->tensor_index, "tensor name");
    if (rc == QPK_OK)
        rc = index_finish(p, &f->meta_index, "metadata key");
    return rc == QPK_OK ? index_finish(p, &f->file_index, "side file") : rc;
}

static int64_t index_find(const qpk_index *index, const char *name)
{
    qpk_name key = {name, 0};
    const qpk_name *hit = NULL;
    if (index->n_entries)
        hit = bsearch(&key, index->entries, (size_t)index->n_entries, sizeof key, compare_names);
    return hit ? hit->index : -1;
}

/* ---- opening ---- */

/* Takes over `data` if mapped, also on failure. */
static int open_bytes(const uint8_t *data, size_t n_bytes, bool mapped, const char *name, qpk_file **ret,
                      char *err, size_t err_bytes)
{
    qpk_file *file = calloc(1, sizeof *file);
    if (file)
        file->path = strdup(name);
    if (!file || !file->path) {
        if (mapped)
            munmap((void *)(uintptr_t)data, n_bytes);
        free(file);
        return qpk_fail(err, err_bytes, QPK_E_RESOURCE, "%s: out of memory", name);
    }
    file->data = data;
    file->n_bytes = n_bytes;
    file->mapped = mapped;
    parse p = {.file = file, .err = err, .err_bytes = err_bytes};
    int rc = parse_header(&p);
    if (rc == QPK_OK)
        rc = check_tables(&p);
    if (rc == QPK_OK)
        rc = parse_tables(&p);
    if (rc == QPK_OK)
        rc = index_all(&p);
    if (rc < 0) {
        qpk_close(file);
        return rc;
    }
    *ret = file;
    return QPK_OK;
}

int qpk_open(const char *path, qpk_file **ret, char *err, size_t err_bytes)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* NONBLOCK: a FIFO must not hang us */
    if (fd < 0)
        return qpk_fail(err, err_bytes, QPK_E_INPUT, "%s: %s", path, strerror(errno));
    struct stat st;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size < QPK_HEADER_BYTES) {
        bool regular = S_ISREG(st.st_mode);
        close(fd);
        return qpk_fail(err, err_bytes, QPK_E_INPUT, "%s: %s", path,
                        regular ? "is not a qpk file (too short)" : "is not a regular file");
    }
    void *data = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
    int map_errno = errno;
    close(fd);
    if (data == MAP_FAILED)
        return qpk_fail(err, err_bytes, QPK_E_RESOURCE, "%s: can not map %lld bytes: %s", path,
                        (long long)st.st_size, strerror(map_errno));
    return open_bytes(data, (size_t)st.st_size, true, path, ret, err, err_bytes);
}

int qpk_open_memory(const void *data, size_t n_bytes, const char *name, qpk_file **ret, char *err,
                    size_t err_bytes)
{
    return open_bytes(data, n_bytes, false, name, ret, err, err_bytes);
}

void qpk_close(qpk_file *file)
{
    if (!file)
        return;
    if (file->mapped)
        munmap((void *)(uintptr_t)file->data, file->n_bytes);
    free(file->path);
    free(file->tensors);
    free(file->aliases);
    free(file->metas);
    free(file->files);
    free(file->tensor_index.entries);
    free(file->meta_index.entries);
    free(file->file_index.entries);
    free(file);
}

/* ---- getters ---- */

int64_t qpk_n_tensors(const qpk_file *file)
{
    return file->n_tensors;
}

const qpk_tensor *qpk_tensor_at(const qpk_file *file, int64_t tensor)
{
    return tensor >= 0 && tensor < file->n_tensors ? &file->tensors[tensor] : NULL;
}

int64_t qpk_find(const qpk_file *file, const char *name)
{
    return index_find(&file->tensor_index, name);
}

int64_t qpk_n_aliases(const qpk_file *file)
{
    return file->n_aliases;
}

const char *qpk_alias_name(const qpk_file *file, int64_t alias)
{
    return alias >= 0 && alias < file->n_aliases ? file->aliases[alias].name : NULL;
}

int64_t qpk_alias_target(const qpk_file *file, int64_t alias)
{
    return alias >= 0 && alias < file->n_aliases ? file->aliases[alias].target : -1;
}

const void *qpk_tensor_data(const qpk_file *file, int64_t tensor)
{
    const qpk_tensor *t = qpk_tensor_at(file, tensor);
    return t ? file->data + t->offset : NULL;
}

int64_t qpk_n_meta(const qpk_file *file)
{
    return file->n_metas;
}

const qpk_meta *qpk_meta_at(const qpk_file *file, int64_t index)
{
    return index >= 0 && index < file->n_metas ? &file->metas[index] : NULL;
}

const qpk_meta *qpk_meta_find(const qpk_file *file, const char *key)
{
    return qpk_meta_at(file, index_find(&file->meta_index, key));
}

static const qpk_meta *meta_typed(const qpk_file *file, const char *key, unsigned type)
{
    const qpk_meta *m = qpk_meta_find(file, key);
    return m && m->type == type ? m : NULL;
}

uint64_t qpk_meta_u64(const qpk_file *file, const char *key, uint64_t absent)
{
    const qpk_meta *m = meta_typed(file, key, QPK_META_U64);
    return m ? m->value.u64 : absent;
}

int64_t qpk_meta_i64(const qpk_file *file, const char *key, int64_t absent)
{
    const qpk_meta *m = meta_typed(file, key, QPK_META_I64);
    return m ? m->value.i64 : absent;
}

double qpk_meta_f64(const qpk_file *file, const char *key, double absent)
{
    const qpk_meta *m = meta_typed(file, key, QPK_META_F64);
    return m ? m->value.f64 : absent;
}

const char *qpk_meta_string(const qpk_file *file, const char *key, const char *absent)
{
    const qpk_meta *m = meta_typed(file, key, QPK_META_STRING);
    return m ? m->value.string : absent;
}

int64_t qpk_n_files(const qpk_file *file)
{
    return file->n_files;
}

const qpk_side_file *qpk_file_at(const qpk_file *file, int64_t index)
{
    return index >= 0 && index < file->n_files ? &file->files[index] : NULL;
}

int64_t qpk_file_find(const qpk_file *file, const char *name)
{
    return index_find(&file->file_index, name);
}

/* ---- side files, checksums, pages ---- */

/* Inflate exactly raw_bytes; zlib's counters are 32 bit, so the data go through in slices. */
static int inflate_all(const uint8_t *src, uint64_t src_bytes, uint8_t *dst, uint64_t dst_bytes)
{
    const uint64_t slice = 1u << 30;
    z_stream z = {0};
    if (inflateInit(&z) != Z_OK)
        return QPK_E_RESOURCE;
    uint8_t spare[1]; /* zlib wants an output buffer, an empty file has none */
    int rc = Z_OK;
    z.next_in = src;
    z.next_out = dst_bytes ? dst : spare;
    while (rc == Z_OK) {
        if (z.avail_in == 0 && src_bytes) {
            z.avail_in = (uInt)(src_bytes < slice ? src_bytes : slice);
            src_bytes -= z.avail_in;
        }
        if (z.avail_out == 0 && dst_bytes) {
            z.avail_out = (uInt)(dst_bytes < slice ? dst_bytes : slice);
            dst_bytes -= z.avail_out;
        }
        rc = inflate(&z, Z_NO_FLUSH);
    }
    bool whole =
        rc == Z_STREAM_END && z.avail_out == 0 && dst_bytes == 0 && z.avail_in == 0 && src_bytes == 0;
    inflateEnd(&z);
    return whole ? QPK_OK : rc == Z_MEM_ERROR ? QPK_E_RESOURCE : QPK_E_INPUT;
}

/* Checksum of a piece of the file; pages are given back behind it. */
static uint32_t crc_of(const qpk_file *file, uint64_t offset, uint64_t n_bytes)
{
    const uint64_t slice = 4u << 20;
    uint32_t crc = 0;
    for (uint64_t done = 0; done < n_bytes; done += slice) {
        uint64_t n = n_bytes - done < slice ? n_bytes - done : slice;
        crc = (uint32_t)crc32_z(crc, file->data + offset + done, n);
        uint64_t first = (offset + done) / slice * slice; /* a multiple of every page size in use */
        if (file->mapped && first + slice <= file->n_bytes)
            madvise((void *)(uintptr_t)(file->data + first), slice, MADV_DONTNEED);
    }
    return crc;
}

int qpk_file_read(const qpk_file *file, int64_t index, void *dst, char *err, size_t err_bytes)
{
    const qpk_side_file *s = qpk_file_at(file, index);
    if (!s)
        return fail_in(file, err, err_bytes, QPK_E_USAGE, "side file %lld of %lld", (long long)index,
                       (long long)file->n_files);
    const uint8_t *src = file->data + s->offset;
    uint32_t crc = (uint32_t)crc32_z(0, src, s->stored_bytes);
    if (crc != s->crc32)
        return fail_in(file, err, err_bytes, QPK_E_INPUT,
                       "side file '%s' is damaged (checksum %08x, expected %08x)", s->name, crc, s->crc32);
    if (s->method == 0) {
        memcpy(dst, src, s->raw_bytes);
        return QPK_OK;
    }
    int rc = inflate_all(src, s->stored_bytes, dst, s->raw_bytes);
    if (rc < 0)
        return fail_in(file, err, err_bytes, rc, "side file '%s' can not be inflated to %llu bytes", s->name,
                       (unsigned long long)s->raw_bytes);
    return QPK_OK;
}

int qpk_check(const qpk_file *file, char *err, size_t err_bytes)
{
    for (int64_t i = 0; i < file->n_tensors; i++) {
        const qpk_tensor *t = &file->tensors[i];
        uint32_t crc = crc_of(file, t->offset, t->n_bytes);
        if (crc != t->crc32)
            return fail_in(file, err, err_bytes, QPK_E_INPUT,
                           "tensor '%s' is damaged (checksum %08x, expected %08x)", t->name, crc, t->crc32);
    }
    for (int64_t i = 0; i < file->n_files; i++) {
        const qpk_side_file *s = &file->files[i];
        uint32_t crc = crc_of(file, s->offset, s->stored_bytes);
        if (crc != s->crc32)
            return fail_in(file, err, err_bytes, QPK_E_INPUT,
                           "side file '%s' is damaged (checksum %08x, expected %08x)", s->name, crc,
                           s->crc32);
    }
    return QPK_OK;
}

void qpk_release(const qpk_file *file, int64_t tensor, int64_t row0, int64_t n_rows)
{
    const qpk_tensor *t = qpk_tensor_at(file, tensor);
    if (!t || !file->mapped || row0 < 0 || n_rows <= 0 || row0 > t->rows || n_rows > t->rows - row0)
        return;
    uint64_t begin, end;        /* in the tensor */
    if (t->dtype == QPK_GRID) { /* whole tiles; the last one may have fewer rows */
        int64_t last = row0 + n_rows == t->rows ? t->layout.n_tiles : (row0 + n_rows) / QPK_TILE_ROWS;
        begin = (uint64_t)((row0 + QPK_TILE_ROWS - 1) / QPK_TILE_ROWS) * t->layout.tile_bytes;
        end = (uint64_t)last * t->layout.tile_bytes;
    } else {
        uint64_t row_bytes = t->n_bytes / (uint64_t)t->rows;
        begin = (uint64_t)row0 * row_bytes;
        end = (uint64_t)(row0 + n_rows) * row_bytes;
    }
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    begin = (t->offset + begin) / page * page; /* down: a page shared with the rows before goes too */
    end = (t->offset + end) / page * page;
    if (begin < end)
        madvise((void *)(uintptr_t)(file->data + begin), end - begin, MADV_DONTNEED);
}
