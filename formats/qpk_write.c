/* Writer of packed files (docs/formats/qpk.md). Tensor data go out as they come, tables and side files are
 * kept in memory until qc_qpk_finish. */
#include "qpk.h"

#include "qc_alloc.h"
#include "qc_buf.h"
#include "qc_file.h"
#include "qc_fp.h"
#include "qc_map.h"
#include "qc_math.h"
#include "runtime/qpk.h"
#include "runtime/qpk_format.h"

#include <math.h>
#include <string.h>
#include <zlib.h>

enum {
    TILE = QPK_TILE_ROWS,
    BLOCK = QPK_BLOCK_COLS,
    STEPS = BLOCK / 4,
    STEP_BYTES = 64,
    ZLIB_LEVEL = 6,     /* fixed: it decides the bytes */
    OUT_BYTES = 1 << 20 /* tiles are written in pieces of about this size */
};

/* The spaces in which a name must be unique; the first byte of a key of the map. */
typedef enum { NAME_TENSOR = 't', NAME_META = 'm', NAME_FILE = 'f' } name_space;

struct qc_qpk_writer {
    qc_outfile *out;  /* NULL: nothing is written, only counted */
    uint64_t counted; /* without out: bytes so far */
    char *path;
    qc_buf strings, metas, values, files, file_data, tensors, aliases;
    qc_map *names; /* name space + name -> index of the tensor, 0 for the others */
    char **keys;   /* owned keys of `names` */
    size_t n_keys, cap_keys;
    int64_t n_tensors;
    uint64_t required; /* features */
    bool finished;

    bool in_tensor; /* between begin and end */
    char *tensor_name;
    uint8_t record[QPK_TENSOR_BYTES];
    int64_t rows, cols, rows_done;
    uint64_t row_bytes; /* of a dense tensor */
    qc_grid grid;
    qpk_layout layout;
    uint32_t crc;
    uint8_t *tiles; /* packed tiles on their way out */
    size_t tiles_bytes;
};

static void put_u16(uint8_t *p, uint16_t v)
{
    memcpy(p, &v, sizeof v);
}

static void put_u32(uint8_t *p, uint32_t v)
{
    memcpy(p, &v, sizeof v);
}

static void put_u64(uint8_t *p, uint64_t v)
{
    memcpy(p, &v, sizeof v);
}

/* ---- life ---- */

static void writer_free(qc_qpk_writer *w)
{
    qc_buf *bufs[] = {&w->strings, &w->metas, &w->values, &w->files, &w->file_data, &w->tensors, &w->aliases};
    for (size_t i = 0; i < sizeof bufs / sizeof bufs[0]; i++)
        qc_buf_clear(bufs[i]);
    for (size_t i = 0; i < w->n_keys; i++)
        qc_free(w->keys[i]);
    qc_free(w->keys);
    qc_map_free(w->names);
    qc_free(w->tensor_name);
    qc_free(w->tiles);
    qc_free(w->path);
    qc_free(w);
}

void qc_qpk_discard(qc_qpk_writer *w)
{
    if (!w)
        return;
    qc_outfile_discard(w->out);
    writer_free(w);
}

static uint64_t out_offset(const qc_qpk_writer *w)
{
    return w->out ? qc_outfile_offset(w->out) : w->counted;
}

static int out_write(qc_qpk_writer *w, const void *data, size_t n_bytes, qc_err *err)
{
    if (w->out)
        return qc_outfile_write(w->out, data, n_bytes, err);
    w->counted += n_bytes;
    return QC_OK;
}

/* Zero bytes up to the next multiple of `align`. */
static int pad_to(qc_qpk_writer *w, uint64_t align, qc_err *err)
{
    static const uint8_t zeros[QPK_PAGE_BYTES];
    uint64_t over = out_offset(w) % align;
    return over ? out_write(w, zeros, align - over, err) : QC_OK;
}

static int create(const char *path, bool count, bool force, qc_qpk_writer **ret, qc_err *err)
{
    static const uint8_t zeros[QPK_PAGE_BYTES]; /* room of the header */
    qc_qpk_writer *w = qc_calloc(1, sizeof *w);
    if (!w)
        return qc_fail_nomem(err, path, sizeof *w);
    int rc;
    w->path = qc_strdup(path);
    w->names = qc_map_new(1024);
    if (!w->path || !w->names) {
        rc = qc_fail_nomem(err, path, strlen(path));
        goto fail;
    }
    w->strings.max_bytes = UINT32_MAX; /* offsets are 32 bit */
    w->values.max_bytes = (size_t)UINT32_MAX * 8;
    rc = count ? QC_OK : qc_outfile_open(path, force, &w->out, err);
    if (rc < 0)
        goto fail;
    rc = out_write(w, zeros, sizeof zeros, err);
    if (rc < 0)
        goto fail;
    *ret = w;
    return QC_OK;
fail:
    qc_qpk_discard(w);
    return rc;
}

int qc_qpk_create(const char *path, bool force, qc_qpk_writer **ret, qc_err *err)
{
    return create(path, false, force, ret, err);
}

int qc_qpk_create_count(const char *name, qc_qpk_writer **ret, qc_err *err)
{
    return create(name, true, false, ret, err);
}

/* ---- names ---- */

static int check_state(const qc_qpk_writer *w, bool in_tensor, const char *what, qc_err *err)
{
    if (w->finished || w->in_tensor != in_tensor)
        return qc_fail(err, QC_E_USAGE, "%s: %s: %s", w->path, what,
                       w->finished    ? "the file is finished"
                       : w->in_tensor ? "a tensor is not ended"
                                      : "no tensor was begun");
    return QC_OK;
}

static int keep_key(qc_qpk_writer *w, char *key)
{
    if (w->n_keys == w->cap_keys) {
        size_t cap = w->cap_keys ? 2 * w->cap_keys : 256;
        char **keys = qc_realloc(w->keys, w->n_keys * sizeof *keys, cap * sizeof *keys);
        if (!keys)
            return QC_E_RESOURCE;
        w->keys = keys;
        w->cap_keys = cap;
    }
    w->keys[w->n_keys++] = key;
    return QC_OK;
}

/* Register a name with its value; the reader's rules for names are kept here. */
static int claim_name(qc_qpk_writer *w, name_space space, const char *name, int64_t value, qc_err *err)
{
    size_t n_bytes = strlen(name);
    if (n_bytes == 0 || n_bytes > QPK_MAX_NAME_BYTES)
        return qc_fail(err, QC_E_INPUT, "%s: a name of %zu bytes, expected 1 to %d", w->path, n_bytes,
                       QPK_MAX_NAME_BYTES);
    for (const char *c = name; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            return qc_fail(err, QC_E_INPUT, "%s: name '%s' holds a control character", w->path, name);
    char *key = qc_asprintf("%c%s", space, name);
    if (!key)
        return qc_fail_nomem(err, name, n_bytes);
    if (keep_key(w, key) < 0) {
        qc_free(key);
        return qc_fail_nomem(err, name, n_bytes);
    }
    int rc = qc_map_add(w->names, key, n_bytes + 1, value);
    if (rc < 0)
        return qc_fail_nomem(err, name, n_bytes);
    if (rc == 0)
        return qc_fail(err, QC_E_INPUT, "%s: '%s' is written twice", w->path, name);
    return QC_OK;
}

/* Append a text with its NUL to the strings; (offset, bytes) go to where_[8]. */
static int put_string(qc_qpk_writer *w, const char *text, uint8_t *where, qc_err *err)
{
    size_t n_bytes = strlen(text);
    uint64_t offset = w->strings.n_bytes;
    QC_TRY(qc_buf_append(&w->strings, text, n_bytes + 1, err));
    put_u32(where, (uint32_t)offset);
    put_u32(where + 4, (uint32_t)n_bytes);
    return QC_OK;
}

/* ---- metadata, side files, aliases ---- */

static int add_meta(qc_qpk_writer *w, const char *key, uint32_t type, uint32_t count, uint64_t value,
                    qc_err *err)
{
    uint8_t rec[QPK_META_BYTES] = {0};
    if (w->finished)
        return check_state(w, false, key, err);
    QC_TRY(claim_name(w, NAME_META, key, 0, err));
    QC_TRY(put_string(w, key, rec + QPK_M_KEY, err));
    put_u32(rec + QPK_M_TYPE, type);
    put_u32(rec + QPK_M_COUNT, count);
    put_u64(rec + QPK_M_VALUE, value);
    return qc_buf_append(&w->metas, rec, sizeof rec, err);
}

int qc_qpk_add_meta_u64(qc_qpk_writer *w, const char *key, uint64_t value, qc_err *err)
{
    return add_meta(w, key, QPK_META_U64, 1, value, err);
}

int qc_qpk_add_meta_i64(qc_qpk_writer *w, const char *key, int64_t value, qc_err *err)
{
    return add_meta(w, key, QPK_META_I64, 1, (uint64_t)value, err);
}

int qc_qpk_add_meta_f64(qc_qpk_writer *w, const char *key, double value, qc_err *err)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return add_meta(w, key, QPK_META_F64, 1, bits, err);
}

int qc_qpk_add_meta_string(qc_qpk_writer *w, const char *key, const char *text, qc_err *err)
{
    uint8_t where[8];
    uint32_t place[2];
    QC_TRY(put_string(w, text, where, err));
    memcpy(place, where, sizeof place);
    return add_meta(w, key, QPK_META_STRING, place[1], place[0], err);
}

static int add_array(qc_qpk_writer *w, const char *key, uint32_t type, const void *values, uint32_t n_elems,
                     qc_err *err)
{
    uint64_t offset = w->values.n_bytes;
    QC_TRY(qc_buf_append(&w->values, values, (size_t)n_elems * 8, err));
    return add_meta(w, key, type, n_elems, offset, err);
}

int qc_qpk_add_meta_u64_array(qc_qpk_writer *w, const char *key, const uint64_t *values, uint32_t n_elems,
                              qc_err *err)
{
    return add_array(w, key, QPK_META_U64_ARRAY, values, n_elems, err);
}

int qc_qpk_add_meta_i64_array(qc_qpk_writer *w, const char *key, const int64_t *values, uint32_t n_elems,
                              qc_err *err)
{
    return add_array(w, key, QPK_META_I64_ARRAY, values, n_elems, err);
}

int qc_qpk_add_meta_f64_array(qc_qpk_writer *w, const char *key, const double *values, uint32_t n_elems,
                              qc_err *err)
{
    return add_array(w, key, QPK_META_F64_ARRAY, values, n_elems, err);
}

/* Append stored bytes to the file data, aligned; the offset is from the start of the section until finish. */
static int add_stored(qc_qpk_writer *w, uint32_t method, const void *data, size_t n_bytes, uint8_t *rec,
                      qc_err *err)
{
    static const uint8_t zeros[QPK_ALIGN_BYTES];
    size_t over = w->file_data.n_bytes % QPK_ALIGN_BYTES;
    if (over)
        QC_TRY(qc_buf_append(&w->file_data, zeros, QPK_ALIGN_BYTES - over, err));
    put_u32(rec + QPK_F_METHOD, method);
    put_u32(rec + QPK_F_CRC, (uint32_t)crc32_z(0, data, n_bytes));
    put_u64(rec + QPK_F_STORED_BYTES, n_bytes);
    put_u64(rec + QPK_F_OFFSET, w->file_data.n_bytes);
    QC_TRY(qc_buf_append(&w->file_data, data, n_bytes, err));
    return qc_buf_append(&w->files, rec, QPK_FILE_BYTES, err);
}

int qc_qpk_add_file(qc_qpk_writer *w, const char *name, const void *data, size_t n_bytes, qc_err *err)
{
    uint8_t rec[QPK_FILE_BYTES] = {0};
    if (w->finished)
        return check_state(w, false, name, err);
    QC_TRY(claim_name(w, NAME_FILE, name, 0, err));
    QC_TRY(put_string(w, name, rec + QPK_F_NAME, err));
    put_u64(rec + QPK_F_RAW_BYTES, n_bytes);
    uLongf packed_bytes = compressBound(n_bytes);
    uint8_t *packed = qc_alloc(packed_bytes, 1);
    if (!packed || compress2(packed, &packed_bytes, data, n_bytes, ZLIB_LEVEL) != Z_OK) {
        qc_free(packed);
        return qc_fail_nomem(err, name, n_bytes);
    }
    int rc = packed_bytes < n_bytes ? add_stored(w, 1, packed, packed_bytes, rec, err)
                                    : add_stored(w, 0, data, n_bytes, rec, err);
    qc_free(packed);
    return rc;
}

int qc_qpk_add_alias(qc_qpk_writer *w, const char *name, const char *target, qc_err *err)
{
    uint8_t rec[QPK_ALIAS_BYTES] = {0};
    if (w->finished)
        return check_state(w, false, name, err);
    char *key = qc_asprintf("%c%s", NAME_TENSOR, target);
    if (!key)
        return qc_fail_nomem(err, target, strlen(target));
    int64_t index = qc_map_get(w->names, key, strlen(key), -1);
    qc_free(key);
    if (index < 0)
        return qc_fail(err, QC_E_USAGE, "%s: alias '%s': tensor '%s' was not written before it", w->path,
                       name, target);
    QC_TRY(claim_name(w, NAME_TENSOR, name, index, err));
    QC_TRY(put_string(w, name, rec + QPK_A_NAME, err));
    put_u32(rec + QPK_A_TARGET, (uint32_t)index);
    return qc_buf_append(&w->aliases, rec, sizeof rec, err);
}

/* ---- tensors ---- */

static int layout_of(const qc_tensor_info *info, qpk_layout *ret, char *text, size_t text_bytes)
{
    return qpk_layout_make(qc_tensor_rows(info), qc_tensor_cols(info), info->grid.bits, info->grid.symmetric,
                           info->grid.scale_dtype, info->grid.group_elems, ret, text, text_bytes);
}

uint64_t qc_qpk_tensor_bytes(const qc_tensor_info *info)
{
    qpk_layout layout;
    uint64_t n_bytes;
    if (info->dtype == QC_DT_GRID)
        n_bytes = layout_of(info, &layout, NULL, 0) < 0 ? 0 : layout.tile_bytes * (uint64_t)layout.n_tiles;
    else
        n_bytes = (uint64_t)qc_tensor_n_elems(info) * (uint64_t)qc_dtype_bits(info->dtype) / 8;
    return (uint64_t)qc_round_up((int64_t)n_bytes, QPK_ALIGN_BYTES);
}

/* Rank and dimensions as the reader wants them. */
static int check_shape(const qc_qpk_writer *w, const qc_tensor_info *info, qc_err *err)
{
    const int64_t limit = (int64_t)1 << 48;
    int64_t n_elems = 1;
    if (info->n_dims < 0 || info->n_dims > QC_MAX_DIMS)
        return qc_fail(err, QC_E_INPUT, "%s: tensor '%s': %d dimensions", w->path, info->name, info->n_dims);
    for (int d = 0; d < info->n_dims; d++) {
        int64_t n = info->shape[d];
        if (n < 0 || n > limit || (n > 0 && n_elems > limit / n))
            return qc_fail(err, QC_E_INPUT, "%s: tensor '%s': dimension %d is %lld", w->path, info->name, d,
                           (long long)n);
        n_elems *= n;
    }
    return QC_OK;
}

static int begin_dense(qc_qpk_writer *w, const qc_tensor_info *info, qc_err *err)
{
    int bits = qc_dtype_bits(info->dtype);
    if (strcmp(qpk_dtype_name(info->dtype), "?") == 0 || bits % 8 != 0)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: tensor '%s': qpk files can not hold %s elements", w->path,
                       info->name, qc_dtype_name(info->dtype));
    if (info->act_bits)
        return qc_fail(err, QC_E_INPUT, "%s: tensor '%s': an activation scheme needs a matrix on a grid",
                       w->path, info->name);
    w->row_bytes = (uint64_t)w->cols * (uint64_t)(bits / 8);
    put_u64(w->record + QPK_T_BYTES, w->row_bytes * (uint64_t)w->rows);
    return QC_OK;
}

/* How the inputs of the matrix are quantized, if they are. */
static int put_acts(qc_qpk_writer *w, const qc_tensor_info *info, qc_err *err)
{
    if (!info->act_bits)
        return QC_OK;
    if (info->act_bits < 2 || info->act_bits > 8 || info->act_group < 0 || info->act_group % BLOCK ||
        info->act_group >= qc_min_i64(w->cols, UINT32_MAX))
        return qc_fail(
            err, QC_E_INPUT,
            "%s: tensor '%s': activations of %d bits in groups of %lld, expected 2 to 8 bits and a "
            "multiple of %d below %lld",
            w->path, info->name, info->act_bits, (long long)info->act_group, BLOCK, (long long)w->cols);
    w->record[QPK_T_ACT_SCHEME] = QPK_ACT_DYNAMIC_TOKEN;
    w->record[QPK_T_ACT_BITS] = (uint8_t)info->act_bits;
    put_u32(w->record + QPK_T_ACT_GROUP, (uint32_t)info->act_group);
    w->required |= QPK_FEATURE_ACTS;
    return QC_OK;
}

static int begin_grid(qc_qpk_writer *w, const qc_tensor_info *info, qc_err *err)
{
    char text[256];
    uint8_t *rec = w->record;
    if (info->grid.kind != QC_GRID_AFFINE)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: tensor '%s': this kind of grid is not stored in qpk files",
                       w->path, info->name);
    int rc = layout_of(info, &w->layout, text, sizeof text);
    if (rc < 0)
        return qc_fail(err, rc, "%s: tensor '%s': %s", w->path, info->name, text);
    QC_TRY(put_acts(w, info, err));
    w->grid = info->grid;
    rec[QPK_T_LAYOUT] = 1;
    rec[QPK_T_GRID] = 1;
    rec[QPK_T_BITS] = (uint8_t)info->grid.bits;
    rec[QPK_T_FLAGS] = info->grid.symmetric ? 0 : QPK_TF_ZEROS;
    put_u16(rec + QPK_T_SCALE_DTYPE, (uint16_t)info->grid.scale_dtype);
    put_u16(rec + QPK_T_ZERO_DTYPE, info->grid.symmetric ? 0 : QPK_U8);
    put_u64(rec + QPK_T_GROUP, (uint64_t)info->grid.group_elems);
    put_u64(rec + QPK_T_TILE_BYTES, w->layout.tile_bytes);
    put_u64(rec + QPK_T_SCALES, w->layout.scales_offset);
    put_u64(rec + QPK_T_ZEROS, w->layout.zeros_offset);
    put_u64(rec + QPK_T_BYTES, w->layout.tile_bytes * (uint64_t)w->layout.n_tiles);
    int64_t n_tiles = qc_max_i64(1, qc_min_i64(w->layout.n_tiles, OUT_BYTES / (int64_t)w->layout.tile_bytes));
    size_t need = (size_t)n_tiles * w->layout.tile_bytes;
    if (need > w->tiles_bytes) {
        qc_free(w->tiles);
        w->tiles_bytes = 0;
        if (!(w->tiles = qc_alloc(need, 1)))
            return qc_fail_nomem(err, info->name, need);
        w->tiles_bytes = need;
    }
    return QC_OK;
}

int qc_qpk_begin_tensor(qc_qpk_writer *w, const qc_tensor_info *info, qc_err *err)
{
    QC_TRY(check_state(w, false, info->name, err));
    QC_TRY(check_shape(w, info, err));
    QC_TRY(pad_to(w, QPK_ALIGN_BYTES, err));
    uint8_t *rec = w->record;
    memset(rec, 0, sizeof w->record);
    put_u16(rec + QPK_T_DTYPE, (uint16_t)info->dtype);
    rec[QPK_T_N_DIMS] = (uint8_t)info->n_dims;
    for (int d = 0; d < info->n_dims; d++)
        put_u64(rec + QPK_T_SHAPE + 8 * d, (uint64_t)info->shape[d]);
    put_u64(rec + QPK_T_OFFSET, out_offset(w));
    w->rows = qc_tensor_rows(info);
    w->cols = qc_tensor_cols(info);
    w->grid = (qc_grid){0};
    QC_TRY(info->dtype == QC_DT_GRID ? begin_grid(w, info, err) : begin_dense(w, info, err));
    QC_TRY(claim_name(w, NAME_TENSOR, info->name, w->n_tensors, err));
    QC_TRY(put_string(w, info->name, rec + QPK_T_NAME, err));
    qc_free(w->tensor_name);
    if (!(w->tensor_name = qc_strdup(info->name)))
        return qc_fail_nomem(err, info->name, strlen(info->name));
    w->rows_done = 0;
    w->crc = 0;
    w->in_tensor = true;
    return QC_OK;
}

static int check_rows(const qc_qpk_writer *w, bool grid, int64_t n_rows, qc_err *err)
{
    QC_TRY(check_state(w, true, "rows", err));
    if (grid != (w->grid.kind != QC_GRID_NONE))
        return qc_fail(err, QC_E_USAGE, "%s: tensor '%s' is %s", w->path, w->tensor_name,
                       grid ? "dense" : "on a grid");
    if (n_rows < 0 || n_rows > w->rows - w->rows_done)
        return qc_fail(err, QC_E_USAGE, "%s: tensor '%s': %lld rows too many", w->path, w->tensor_name,
                       (long long)(n_rows - (w->rows - w->rows_done)));
    return QC_OK;
}

static int put_bytes(qc_qpk_writer *w, const void *data, size_t n_bytes, qc_err *err)
{
    if (n_bytes == 0)
        return QC_OK; /* data may be NULL, for which zlib starts the checksum again */
    w->crc = (uint32_t)crc32_z(w->crc, data, n_bytes);
    return out_write(w, data, n_bytes, err);
}

int qc_qpk_put_dense(qc_qpk_writer *w, const void *data, int64_t n_rows, qc_err *err)
{
    QC_TRY(check_rows(w, false, n_rows, err));
    QC_TRY(put_bytes(w, data, (size_t)n_rows * w->row_bytes, err));
    w->rows_done += n_rows;
    return QC_OK;
}

/* block[STEPS][16 rows][4 columns] = codes of n_rows x n_cols (<= 16 x 32), zeros elsewhere. */
static void gather_block(const uint8_t *codes, int64_t ld, int64_t n_rows, int64_t n_cols, uint8_t *block)
{
    if (n_rows < TILE || n_cols < BLOCK)
        memset(block, 0, STEPS * STEP_BYTES);
    for (int64_t r = 0; r < n_rows; r++) {
        const uint8_t *row = codes + r * ld;
        uint8_t padded[BLOCK] = {0};
        if (n_cols < BLOCK) {
            memcpy(padded, row, (size_t)n_cols);
            row = padded;
        }
        for (int step = 0; step < STEPS; step++)
            memcpy(block + step * STEP_BYTES + r * 4, row + 4 * step, 4);
    }
}

/* One plane of w bits of a block, from bit `shift` of the codes: w units of 64 bytes, 8 / w steps each. */
static inline __attribute__((always_inline)) void pack_plane(const uint8_t *block, int w, int shift,
                                                             uint8_t *plane)
{
    const uint64_t mask = 0x0101010101010101u * ((1u << w) - 1u);
    int steps_per_unit = 8 / w;
    for (int unit = 0; unit < w; unit++)
        for (int i = 0; i < STEP_BYTES; i += 8) {
            uint64_t sum = 0;
            for (int s = 0; s < steps_per_unit; s++) {
                uint64_t x;
                memcpy(&x, block + (unit * steps_per_unit + s) * STEP_BYTES + i, sizeof x);
                sum |= ((x >> shift) & mask) << (w * s);
            }
            memcpy(plane + unit * STEP_BYTES + i, &sum, sizeof sum);
        }
}

/* Pack a block of codes; returns the OR of all code bytes, for the range check. */
static uint8_t pack_block(const uint8_t *block, int bits, uint8_t *dst)
{
    uint8_t any = 0;
    int low = 0;
    for (int i = 0; i < STEPS * STEP_BYTES; i++)
        any |= block[i];
    if (bits & 8)
        memcpy(dst, block, STEPS * STEP_BYTES);
    if (bits & 4) {
        pack_plane(block, 4, 0, dst);
        low = 4;
    }
    if (bits & 2) {
        pack_plane(block, 2, low, dst + low * STEP_BYTES);
        low += 2;
    }
    if (bits & 1)
        pack_plane(block, 1, low, dst + low * STEP_BYTES);
    return any;
}

/* Store a scale; false if it is not finite or not exact in the type. */
static bool put_scale(qc_dtype dtype, float scale, uint8_t *dst)
{
    uint16_t half;
    float back = scale;
    if (dtype == QC_DT_F32) {
        memcpy(dst, &scale, sizeof scale);
    } else {
        half = dtype == QC_DT_F16 ? qc_f32_to_f16(scale) : qc_f32_to_bf16(scale);
        back = dtype == QC_DT_F16 ? qc_f16_to_f32(half) : qc_bf16_to_f32(half);
        put_u16(dst, half);
    }
    return isfinite(scale) && back == scale;
}

/* Scales and zero points of rows r0 .. of one tile. */
static int pack_params(const qc_qpk_writer *w, const qc_code_rows *rows, int64_t r0, int64_t n_rows,
                       uint8_t *tile, qc_err *err)
{
    int64_t n_groups = w->layout.n_groups;
    size_t scale_bytes = w->grid.scale_dtype == QC_DT_F32 ? 4 : 2;
    for (int64_t g = 0; g < n_groups; g++)
        for (int64_t r = 0; r < n_rows; r++) {
            int64_t from = (r0 + r) * n_groups + g, to = g * TILE + r;
            uint8_t *dst = tile + w->layout.scales_offset + (size_t)to * scale_bytes;
            if (!put_scale(w->grid.scale_dtype, rows->scales[from], dst))
                return qc_fail(err, QC_E_INPUT,
                               "%s: tensor '%s': scale %g of row %lld, group %lld is not a %s value", w->path,
                               w->tensor_name, (double)rows->scales[from], (long long)(w->rows_done + r0 + r),
                               (long long)g, qc_dtype_name(w->grid.scale_dtype));
            if (!w->grid.symmetric)
                tile[w->layout.zeros_offset + (uint64_t)to] = rows->zeros[from];
        }
    return QC_OK;
}

/* Rows r0 .. of *rows (up to 16 of them) as one tile. */
static int pack_tile(const qc_qpk_writer *w, const qc_code_rows *rows, int64_t r0, int64_t n_rows,
                     uint8_t *tile, qc_err *err)
{
    _Alignas(64) uint8_t block[STEPS * STEP_BYTES];
    uint8_t any = 0;
    for (int64_t b = 0; b < w->layout.n_blocks; b++) {
        int64_t c0 = b * BLOCK;
        gather_block(rows->codes + r0 * w->cols + c0, w->cols, n_rows, qc_min_i64(BLOCK, w->cols - c0),
                     block);
        any |= pack_block(block, w->grid.bits, tile + b * 64 * w->grid.bits);
    }
    if (any >> w->grid.bits)
        return qc_fail(err, QC_E_INPUT, "%s: tensor '%s': a code in rows %lld.. does not fit %d bits",
                       w->path, w->tensor_name, (long long)(w->rows_done + r0), w->grid.bits);
    memset(tile + w->layout.scales_offset, 0, w->layout.tile_bytes - w->layout.scales_offset);
    return pack_params(w, rows, r0, n_rows, tile, err);
}

int qc_qpk_put_codes(qc_qpk_writer *w, const qc_code_rows *rows, qc_err *err)
{
    QC_TRY(check_rows(w, true, rows->n_rows, err));
    if (rows->n_rows % TILE != 0 && w->rows_done + rows->n_rows != w->rows)
        return qc_fail(err, QC_E_USAGE,
                       "%s: tensor '%s': %lld rows, expected a multiple of %d before the last ones", w->path,
                       w->tensor_name, (long long)rows->n_rows, TILE);
    size_t tile_bytes = w->layout.tile_bytes, n_held = 0;
    for (int64_t r = 0; r < rows->n_rows; r += TILE) {
        if (n_held + tile_bytes > w->tiles_bytes) {
            QC_TRY(put_bytes(w, w->tiles, n_held, err));
            n_held = 0;
        }
        QC_TRY(pack_tile(w, rows, r, qc_min_i64(TILE, rows->n_rows - r), w->tiles + n_held, err));
        n_held += tile_bytes;
    }
    QC_TRY(put_bytes(w, w->tiles, n_held, err));
    w->rows_done += rows->n_rows;
    return QC_OK;
}

int qc_qpk_end_tensor(qc_qpk_writer *w, qc_err *err)
{
    QC_TRY(check_state(w, true, "end", err));
    if (w->rows_done != w->rows)
        return qc_fail(err, QC_E_USAGE, "%s: tensor '%s': %lld of %lld rows were written", w->path,
                       w->tensor_name, (long long)w->rows_done, (long long)w->rows);
    put_u32(w->record + QPK_T_CRC, w->crc);
    QC_TRY(qc_buf_append(&w->tensors, w->record, sizeof w->record, err));
    w->n_tensors++;
    w->in_tensor = false;
    return QC_OK;
}

/* ---- end ---- */

/* Append a section and describe it in the header. */
static int put_section(qc_qpk_writer *w, uint8_t *header, int section, const qc_buf *buf, size_t record_bytes,
                       qc_err *err)
{
    QC_TRY(pad_to(w, section <= QPK_SEC_STRINGS ? QPK_PAGE_BYTES : QPK_ALIGN_BYTES, err));
    uint8_t *entry = header + QPK_H_SECTIONS + section * QPK_SECTION_BYTES;
    put_u64(entry + QPK_S_OFFSET, out_offset(w));
    put_u64(entry + QPK_S_BYTES, buf->n_bytes);
    if (record_bytes) {
        put_u32(entry + QPK_S_COUNT, (uint32_t)(buf->n_bytes / record_bytes));
        put_u32(entry + QPK_S_CRC, (uint32_t)crc32_z(0, (const uint8_t *)buf->data, buf->n_bytes));
    }
    return buf->n_bytes ? out_write(w, buf->data, buf->n_bytes, err) : QC_OK;
}

/* Side file offsets become absolute once their section's place is known. */
static void place_files(qc_qpk_writer *w, uint64_t base)
{
    for (size_t at = 0; at < w->files.n_bytes; at += QPK_FILE_BYTES) {
        uint8_t *field = (uint8_t *)w->files.data + at + QPK_F_OFFSET;
        uint64_t offset;
        memcpy(&offset, field, sizeof offset);
        put_u64(field, base + offset);
    }
}

static int put_sections(qc_qpk_writer *w, uint8_t *header, qc_err *err)
{
    uint8_t *entry = header + QPK_H_SECTIONS + QPK_SEC_TENSOR_DATA * QPK_SECTION_BYTES;
    put_u64(entry + QPK_S_OFFSET, QPK_PAGE_BYTES);
    put_u64(entry + QPK_S_BYTES, out_offset(w) - QPK_PAGE_BYTES);
    QC_TRY(pad_to(w, QPK_PAGE_BYTES, err));
    place_files(w, out_offset(w));
    QC_TRY(put_section(w, header, QPK_SEC_FILE_DATA, &w->file_data, 0, err));
    QC_TRY(put_section(w, header, QPK_SEC_STRINGS, &w->strings, 1, err));
    QC_TRY(put_section(w, header, QPK_SEC_META, &w->metas, QPK_META_BYTES, err));
    QC_TRY(put_section(w, header, QPK_SEC_VALUES, &w->values, 8, err));
    QC_TRY(put_section(w, header, QPK_SEC_FILES, &w->files, QPK_FILE_BYTES, err));
    QC_TRY(put_section(w, header, QPK_SEC_TENSORS, &w->tensors, QPK_TENSOR_BYTES, err));
    return put_section(w, header, QPK_SEC_ALIASES, &w->aliases, QPK_ALIAS_BYTES, err);
}

int qc_qpk_count_tensor(qc_qpk_writer *w, const qc_tensor_info *info, qc_err *err)
{
    QC_TRY(qc_qpk_begin_tensor(w, info, err));
    if (w->out)
        return qc_fail(err, QC_E_USAGE, "%s: tensor '%s' has no data", w->path, info->name);
    w->counted += w->grid.kind == QC_GRID_NONE ? w->row_bytes * (uint64_t)w->rows
                                               : w->layout.tile_bytes * (uint64_t)w->layout.n_tiles;
    w->rows_done = w->rows;
    return qc_qpk_end_tensor(w, err);
}

int qc_qpk_count(qc_qpk_writer *w, uint64_t *ret_bytes, qc_err *err)
{
    uint8_t header[QPK_HEADER_BYTES] = {0};
    QC_TRY(check_state(w, false, "count", err));
    if (w->out)
        return qc_fail(err, QC_E_USAGE, "%s: the file is written, not counted", w->path);
    QC_TRY(put_sections(w, header, err));
    *ret_bytes = w->counted;
    w->finished = true;
    return QC_OK;
}

int qc_qpk_finish(qc_qpk_writer *w, const char **ret_temp_path, qc_err *err)
{
    uint8_t header[QPK_HEADER_BYTES] = {0};
    QC_TRY(check_state(w, false, "finish", err));
    if (!w->out)
        return qc_fail(err, QC_E_USAGE, "%s: the file is only counted", w->path);
    QC_TRY(put_sections(w, header, err));
    memcpy(header + QPK_H_MAGIC, QPK_MAGIC, 8);
    put_u32(header + QPK_H_VERSION, QPK_VERSION);
    put_u32(header + QPK_H_HEADER_BYTES, QPK_HEADER_BYTES);
    put_u64(header + QPK_H_REQUIRED, w->required);
    put_u64(header + QPK_H_FILE_BYTES, qc_outfile_offset(w->out));
    put_u32(header + QPK_H_N_SECTIONS, QPK_N_SECTIONS);
    put_u32(header + QPK_H_CRC, (uint32_t)crc32_z(0, header, QPK_H_CRC));
    QC_TRY(qc_outfile_pwrite(w->out, header, sizeof header, 0, err));
    QC_TRY(qc_outfile_sync(w->out, err));
    w->finished = true;
    *ret_temp_path = qc_outfile_temp_path(w->out);
    return QC_OK;
}

int qc_qpk_publish(qc_qpk_writer *w, const char *other_path, qc_err *err)
{
    int rc;
    if (w->finished)
        rc = qc_outfile_commit(w->out, other_path, err);
    else {
        rc = qc_fail(err, QC_E_USAGE, "%s: the file is not finished", w->path);
        qc_outfile_discard(w->out);
    }
    writer_free(w);
    return rc;
}
