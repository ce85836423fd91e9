/* Token ids from a NumPy file (the .npy format of numpy.lib.format, versions 1 to 3). */
#include "corpus_internal.h"

#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_math.h"

#include <stdbool.h>
#include <string.h>

#define MAX_DIM (1ll << 40)

typedef struct header {
    size_t data_offset;
    int64_t shape[2];
    int n_dims;
    int elem_bytes;
    bool is_signed;
} header;

static int bad(const char *path, const char *what, qc_err *err)
{
    return qc_fail(err, QC_E_INPUT, "%s: not a .npy file of token ids: %s", path, what);
}

/* The value of a key of the header, a Python dictionary of known form: {'descr': '<i4', 'fortran_order':
 * False, 'shape': (3, 4), }; NULL if it is not there. */
static const char *value_of(const char *dict, const char *key)
{
    const char *p = strstr(dict, key);
    if (!p)
        return NULL;
    p += strlen(key);
    p += strspn(p, " ");
    if (*p != ':')
        return NULL;
    p++;
    return p + strspn(p, " ");
}

static int read_shape(const char *path, const char *p, header *h, qc_err *err)
{
    if (*p++ != '(')
        return bad(path, "no shape", err);
    for (;;) {
        p += strspn(p, " ");
        if (*p == ')')
            break;
        if (*p < '0' || *p > '9')
            return bad(path, "no shape", err);
        int64_t n = 0;
        for (; *p >= '0' && *p <= '9'; p++)
            n = qc_min_i64(n * 10 + (*p - '0'), MAX_DIM + 1);
        if (h->n_dims == 2)
            return bad(path, "more than two dimensions, [n] or [n, length] was expected", err);
        if (n < 1 || n > MAX_DIM)
            return bad(path, "a dimension that is 0 or too large", err);
        h->shape[h->n_dims++] = n;
        p += strspn(p, " ");
        if (*p == ',')
            p++;
        else if (*p != ')')
            return bad(path, "no shape", err);
    }
    return h->n_dims ? QC_OK : bad(path, "a single number, [n] or [n, length] was expected", err);
}

static int read_dict(const char *path, const char *dict, header *h, qc_err *err)
{
    const char *descr = value_of(dict, "'descr'"), *order = value_of(dict, "'fortran_order'"),
               *shape = value_of(dict, "'shape'");
    if (!descr || !order || !shape)
        return bad(path, "header without descr, fortran_order and shape", err);
    static const struct {
        const char *descr;
        int bytes;
        bool is_signed;
    } types[] = {{"'<i4'", 4, true}, {"'<i8'", 8, true}, {"'<u2'", 2, false}, {"'<u4'", 4, false}};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if (strncmp(descr, types[i].descr, strlen(types[i].descr)) == 0) {
            h->elem_bytes = types[i].bytes;
            h->is_signed = types[i].is_signed;
        }
    if (!h->elem_bytes)
        return qc_fail(
            err, QC_E_UNSUPPORTED,
            "%s: elements of type %.*s: int32, int64, uint16 or uint32, little-endian, were expected", path,
            (int)qc_min_i64(40, (int64_t)strcspn(descr, ",}")), descr);
    QC_TRY(read_shape(path, shape, h, err));
    if (strncmp(order, "False", 5) != 0 && h->n_dims == 2)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: stored column by column: save it in C order", path);
    return QC_OK;
}

static int read_header(const char *path, const qc_mapped *map, header *h, qc_err *err)
{
    const uint8_t *d = map->data;
    if (map->n_bytes < 12 || memcmp(d, "\x93NUMPY", 6) != 0)
        return bad(path, "it does not start with \\x93NUMPY", err);
    if (d[6] < 1 || d[6] > 3)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: .npy version %d", path, d[6]);
    size_t start = d[6] == 1 ? 10 : 12, n = (size_t)d[8] | (size_t)d[9] << 8;
    if (d[6] > 1)
        n |= (size_t)d[10] << 16 | (size_t)d[11] << 24;
    if (n > 65536 || n > map->n_bytes - start)
        return bad(path, "header longer than the file", err);
    char *dict = qc_strndup((const char *)d + start, n);
    if (!dict)
        return qc_fail_nomem(err, path, n);
    h->data_offset = start + n;
    int rc = read_dict(path, dict, h, err);
    qc_free(dict);
    if (rc < 0)
        return rc;
    size_t elems, bytes;
    if (!qc_mul_size((size_t)h->shape[0], h->n_dims == 2 ? (size_t)h->shape[1] : 1, &elems) ||
        !qc_mul_size(elems, (size_t)h->elem_bytes, &bytes) || bytes != map->n_bytes - h->data_offset)
        return qc_fail(err, QC_E_INPUT, "%s: %zu bytes of data do not fit the shape of the header", path,
                       map->n_bytes - h->data_offset);
    return QC_OK;
}

/* Element i; an id that no int32 holds becomes -1, which no model knows. */
static int32_t id_at(const uint8_t *data, const header *h, size_t i)
{
    const uint8_t *p = data + i * (size_t)h->elem_bytes;
    uint64_t v = 0;
    for (int b = 0; b < h->elem_bytes; b++)
        v |= (uint64_t)p[b] << (8 * b);
    return v > INT32_MAX ? -1 : (int32_t)v;
}

static int read_ids(qc_id_stream *st, const char *path, const qc_corpus_options *options,
                    const qc_mapped *map, qc_err *err)
{
    header h = {0};
    QC_TRY(read_header(path, map, &h, err));
    size_t n = (map->n_bytes - h.data_offset) / (size_t)h.elem_bytes;
    if (options->memory_bytes && n > options->memory_bytes / sizeof *st->ids)
        return qc_fail(err, QC_E_RESOURCE, "%s: %zu token ids need more memory than the cap leaves (%llu MB)",
                       path, n, (unsigned long long)(options->memory_bytes / 1000000));
    st->ids = qc_alloc(n, sizeof *st->ids);
    if (!st->ids)
        return qc_fail_nomem(err, path, n * sizeof *st->ids);
    for (size_t i = 0; i < n; i++)
        st->ids[i] = id_at(map->data + h.data_offset, &h, i);
    st->n_ids = st->cap_ids = n;
    st->n_documents = h.n_dims == 2 ? h.shape[0] : 1;
    st->row_length = h.n_dims == 2 ? h.shape[1] : 0;
    return QC_OK;
}

int qc_corpus_read_npy(qc_id_stream *st, const char *path, const qc_corpus_options *options, qc_err *err)
{
    qc_mapped map;
    QC_TRY(qc_file_map(path, &map, err));
    int rc = read_ids(st, path, options, &map, err);
    qc_file_unmap(&map);
    return rc;
}
