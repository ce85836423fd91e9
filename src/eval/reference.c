#include "reference_internal.h"

#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_json.h"
#include "qc_math.h"

#include <stdio.h>
#include <string.h>
#include <zlib.h>

/* docs/formats/reference.md */
static const char magic[8] = {'q', 'c', '-', 'k', 'l', 'r', 'e', 'f'};
enum { VERSION = 1, FIXED_BYTES = 20, BLOCK_BYTES = 12 };
#define MAX_HEAD_BYTES (1 << 20)

/* What the header says besides the origin. */
typedef struct header {
    qc_protocol protocol;
    int64_t vocab, keep, drawn, length, stride, n_windows;
    int64_t positions; /* of all windows */
    bool plain_special;
    qc_bos bos; /* QC_BOS_TOKENIZER: of a file that does not say which id */
    int64_t bos_id;
    char ids_sha256[65];
} header;

struct qc_reference_writer {
    qc_outfile *out;
    header h;
    const qc_windows *windows;
    int64_t n_done; /* windows that are written */
};

struct qc_reference {
    char *path;
    qc_mapped map;
    qc_reference_origin origin; /* strings owned */
    header h;
    size_t *blocks; /* [n_windows] offset of each window's block */
};

/* ---- writing ---- */

static cJSON *header_json(const header *h, const qc_reference_origin *o)
{
    qc_json_watch();
    cJSON *doc = cJSON_CreateObject(), *model = cJSON_AddObjectToObject(doc, "model"),
          *text = cJSON_AddObjectToObject(doc, "text");
    cJSON_AddStringToObject(model, "name", o->model);
    cJSON_AddStringToObject(model, "sha256", o->model_sha256);
    cJSON_AddStringToObject(model, "tokenizer_sha256", o->tokenizer_sha256);
    cJSON_AddNumberToObject(model, "vocab", (double)h->vocab);
    cJSON_AddStringToObject(model, "compute", o->compute);
    cJSON_AddStringToObject(text, "name", o->text);
    cJSON_AddStringToObject(text, "sha256", o->text_sha256);
    cJSON_AddStringToObject(text, "ids_sha256", h->ids_sha256);
    cJSON_AddStringToObject(text, "protocol", qc_protocol_name(h->protocol));
    cJSON_AddNumberToObject(text, "length", (double)h->length);
    cJSON_AddNumberToObject(text, "stride", (double)h->stride);
    cJSON_AddNumberToObject(text, "windows", (double)h->n_windows);
    cJSON_AddNumberToObject(text, "positions", (double)h->positions);
    cJSON_AddBoolToObject(text, "plain_special", h->plain_special);
    cJSON_AddBoolToObject(text, "bos", h->bos == QC_BOS_ID);
    if (h->bos == QC_BOS_ID)
        cJSON_AddNumberToObject(text, "bos_id", (double)h->bos_id);
    cJSON_AddNumberToObject(doc, "keep", (double)h->keep);
    cJSON_AddNumberToObject(doc, "drawn", (double)h->drawn);
    return qc_json_watched(doc);
}

static int write_header(qc_reference_writer *w, const qc_reference_origin *origin, qc_err *err)
{
    cJSON *doc = header_json(&w->h, origin);
    char *text = doc ? qc_json_print(doc) : NULL;
    cJSON_Delete(doc);
    if (!text)
        return qc_fail_nomem(err, "header of a reference", 4096);
    size_t n = strlen(text);
    uint8_t fixed[FIXED_BYTES];
    memcpy(fixed, magic, sizeof magic);
    qc_put_le(fixed + 8, VERSION, 4);
    qc_put_le(fixed + 12, n, 4);
    qc_put_le(fixed + 16, crc32_z(0, (const uint8_t *)text, n), 4);
    int rc = qc_outfile_write(w->out, fixed, sizeof fixed, err);
    if (rc == QC_OK)
        rc = qc_outfile_write(w->out, text, n, err);
    qc_free(text);
    return rc;
}

int qc_reference_create(const char *path, bool force, const qc_reference_origin *origin,
                        const qc_windows *windows, int64_t vocab, qc_reference_writer **ret, qc_err *err)
{
    qc_reference_writer *w = qc_calloc(1, sizeof *w);
    if (!w)
        return qc_fail_nomem(err, "reference", sizeof *w);
    w->windows = windows;
    w->h = (header){.protocol = windows->protocol,
                    .vocab = vocab,
                    .keep = qc_min_i64(vocab, QC_REFERENCE_KEEP),
                    .drawn = vocab > QC_REFERENCE_KEEP ? QC_REFERENCE_DRAWN : 0,
                    .length = windows->length,
                    .stride = windows->stride ? windows->stride : windows->length,
                    .n_windows = windows->n_windows,
                    .positions = qc_windows_scored(windows, windows->n_windows),
                    .plain_special = windows->plain_special,
                    .bos = windows->bos ? QC_BOS_ID : QC_BOS_NONE,
                    .bos_id = windows->bos_id};
    memcpy(w->h.ids_sha256, windows->ids_sha256, sizeof w->h.ids_sha256);
    int rc = qc_outfile_open(path, force, &w->out, err);
    if (rc == QC_OK)
        rc = write_header(w, origin, err);
    if (rc == QC_OK)
        *ret = w;
    else
        qc_reference_discard(w);
    return rc;
}

static int64_t window_scored(const qc_windows *w, int64_t window)
{
    return w->lengths[window] - (w->first ? w->first[window] : 1);
}

static int write_block(qc_reference_writer *w, const qc_buf *raw, qc_err *err)
{
    uLong most = compressBound((uLong)raw->n_bytes), n = most;
    uint8_t *packed = qc_alloc(BLOCK_BYTES + most, 1);
    if (!packed)
        return qc_fail_nomem(err, "reference", most);
    int rc = compress2(packed + BLOCK_BYTES, &n, (const Bytef *)raw->data, (uLong)raw->n_bytes, 9) == Z_OK
                 ? QC_OK
                 : qc_fail(err, QC_E_RESOURCE, "reference: zlib could not compress a window");
    qc_put_le(packed, n, 4);
    qc_put_le(packed + 4, raw->n_bytes, 4);
    qc_put_le(packed + 8, crc32_z(0, packed + BLOCK_BYTES, n), 4);
    if (rc == QC_OK)
        rc = qc_outfile_write(w->out, packed, BLOCK_BYTES + n, err);
    qc_free(packed);
    return rc;
}

int qc_reference_put(qc_reference_writer *w, const qc_kept *kept, int64_t n_windows, qc_err *err)
{
    int rc = QC_OK;
    for (int64_t i = 0, at = 0; i < n_windows && rc == QC_OK; i++, w->n_done++) {
        int64_t n = window_scored(w->windows, w->n_done);
        qc_buf raw = {0};
        rc = qc_kept_pack(kept, at, n, &raw, err);
        if (rc == QC_OK)
            rc = write_block(w, &raw, err);
        qc_buf_clear(&raw);
        at += n;
    }
    return rc;
}

void qc_reference_sizes(const qc_reference_writer *writer, int64_t *ret_keep, int64_t *ret_drawn)
{
    *ret_keep = writer->h.keep;
    *ret_drawn = writer->h.drawn;
}

int qc_reference_commit(qc_reference_writer *w, qc_err *err)
{
    int rc = QC_OK;
    if (w->n_done < w->h.n_windows)
        rc = qc_fail(err, QC_E_USAGE, "reference: %lld of %lld windows were scored", (long long)w->n_done,
                     (long long)w->h.n_windows);
    if (rc == QC_OK) {
        rc = qc_outfile_commit(w->out, NULL, err);
        w->out = NULL;
    }
    qc_reference_discard(w);
    return rc;
}

void qc_reference_discard(qc_reference_writer *writer)
{
    if (!writer)
        return;
    qc_outfile_discard(writer->out);
    qc_free(writer);
}

/* ---- reading ---- */

static int damaged(const qc_reference *r, const char *what, qc_err *err)
{
    return qc_fail(err, QC_E_INPUT, "%s: damaged reference file: %s", r->path, what);
}

static bool get_int(const cJSON *object, const char *key, int64_t min, int64_t max, int64_t *ret)
{
    return qc_json_int(qc_json_get(object, key), ret) && *ret >= min && *ret <= max;
}

static bool get_hash(const cJSON *object, const char *key, char ret[65])
{
    const cJSON *item = qc_json_get(object, key);
    if (!cJSON_IsString(item) || strspn(item->valuestring, "0123456789abcdef") != 64 || item->valuestring[64])
        return false;
    memcpy(ret, item->valuestring, 65);
    return true;
}

/* A name that can be printed, owned. */
static bool get_name(const cJSON *object, const char *key, const char **ret)
{
    const cJSON *item = qc_json_get(object, key);
    char line[512];
    if (!cJSON_IsString(item))
        return false;
    qc_one_line(line, sizeof line, item->valuestring);
    *ret = qc_strdup(line);
    return *ret != NULL;
}

static bool get_protocol(const cJSON *text, qc_protocol *ret)
{
    const cJSON *item = qc_json_get(text, "protocol");
    for (int p = QC_PROTOCOL_GPTQ; p <= QC_PROTOCOL_FULL; p++)
        if (cJSON_IsString(item) && strcmp(item->valuestring, qc_protocol_name((qc_protocol)p)) == 0) {
            *ret = (qc_protocol)p;
            return true;
        }
    return false;
}

/* The limits keep all sizes that are computed from them far from overflow. */
static bool read_header(const cJSON *doc, header *h, qc_reference_origin *o)
{
    const cJSON *model = qc_json_get(doc, "model"), *text = qc_json_get(doc, "text");
    h->plain_special = cJSON_IsTrue(qc_json_get(text, "plain_special"));
    h->bos = !cJSON_IsTrue(qc_json_get(text, "bos"))             ? QC_BOS_NONE
             : get_int(text, "bos_id", 0, INT32_MAX, &h->bos_id) ? QC_BOS_ID
                                                                 : QC_BOS_TOKENIZER;
    return get_name(model, "name", &o->model) && get_name(model, "compute", &o->compute) &&
           get_name(text, "name", &o->text) && get_hash(model, "sha256", o->model_sha256) &&
           get_hash(model, "tokenizer_sha256", o->tokenizer_sha256) &&
           get_hash(text, "sha256", o->text_sha256) && get_hash(text, "ids_sha256", h->ids_sha256) &&
           get_protocol(text, &h->protocol) && get_int(model, "vocab", 2, 1 << 30, &h->vocab) &&
           get_int(text, "length", 2, 1 << 24, &h->length) &&
           get_int(text, "stride", 1, 1 << 24, &h->stride) &&
           get_int(text, "windows", 1, 1 << 30, &h->n_windows) &&
           get_int(text, "positions", 1, (int64_t)1 << 40, &h->positions) &&
           get_int(doc, "keep", 1, qc_min_i64(h->vocab, 65536), &h->keep) &&
           get_int(doc, "drawn", 0, 65536, &h->drawn) && (h->drawn > 0) == (h->vocab > h->keep);
}

static int open_header(qc_reference *r, size_t *ret_at, qc_err *err)
{
    const uint8_t *p = r->map.data;
    if (r->map.n_bytes < FIXED_BYTES || memcmp(p, magic, sizeof magic) != 0)
        return qc_fail(err, QC_E_INPUT, "%s: no stored reference (wrong first bytes)", r->path);
    uint64_t version = qc_get_le(p + 8, 4), n = qc_get_le(p + 12, 4);
    if (version != VERSION)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: reference file of version %llu, this program reads %d",
                       r->path, (unsigned long long)version, VERSION);
    if (n > MAX_HEAD_BYTES || n > r->map.n_bytes - FIXED_BYTES)
        return damaged(r, "its header is cut off", err);
    if (crc32_z(0, p + FIXED_BYTES, n) != qc_get_le(p + 16, 4))
        return damaged(r, "the sum of its header does not match", err);
    cJSON *doc;
    QC_TRY(qc_json_parse((const char *)p + FIXED_BYTES, n, r->path, true, &doc, err));
    bool good = read_header(doc, &r->h, &r->origin);
    cJSON_Delete(doc);
    *ret_at = FIXED_BYTES + n;
    return good ? QC_OK : damaged(r, "its header says something impossible", err);
}

static int open_blocks(qc_reference *r, size_t at, qc_err *err)
{
    const header *h = &r->h;
    size_t left = r->map.n_bytes - at;
    if ((uint64_t)h->n_windows > left / BLOCK_BYTES)
        return damaged(r, "it is cut off", err);
    r->blocks = qc_alloc((size_t)h->n_windows, sizeof *r->blocks);
    if (!r->blocks)
        return qc_fail_nomem(err, "reference", (unsigned long long)h->n_windows * 8);
    for (int64_t i = 0; i < h->n_windows; i++) {
        const uint8_t *p = r->map.data + at;
        if (r->map.n_bytes - at < BLOCK_BYTES)
            return damaged(r, "it is cut off", err);
        uint64_t n = qc_get_le(p, 4);
        if (n > r->map.n_bytes - at - BLOCK_BYTES)
            return damaged(r, "it is cut off", err);
        if (crc32_z(0, p + BLOCK_BYTES, n) != qc_get_le(p + 8, 4))
            return damaged(r, "the sum of a window does not match", err);
        r->blocks[i] = at;
        at += BLOCK_BYTES + n;
    }
    return at == r->map.n_bytes ? QC_OK : damaged(r, "there is something behind its last window", err);
}

bool qc_reference_is(const char *path)
{
    qc_mapped map;
    if (qc_path_is_dir(path) || qc_file_map(path, &map, NULL) < 0)
        return false;
    bool is = map.n_bytes >= sizeof magic && memcmp(map.data, magic, sizeof magic) == 0;
    qc_file_unmap(&map);
    return is;
}

int qc_reference_open(const char *path, qc_reference **ret, qc_err *err)
{
    qc_reference *r = qc_calloc(1, sizeof *r);
    size_t at = 0;
    if (!r || !(r->path = qc_strdup(path))) {
        qc_free(r);
        return qc_fail_nomem(err, "reference", 4096);
    }
    int rc = qc_file_map(path, &r->map, err);
    if (rc == QC_OK)
        rc = open_header(r, &at, err);
    if (rc == QC_OK)
        rc = open_blocks(r, at, err);
    if (rc == QC_OK)
        *ret = r;
    else
        qc_reference_close(r);
    return rc;
}

void qc_reference_close(qc_reference *ref)
{
    if (!ref)
        return;
    qc_file_unmap(&ref->map);
    qc_free((char *)ref->origin.model);
    qc_free((char *)ref->origin.text);
    qc_free((char *)ref->origin.compute);
    qc_free(ref->blocks);
    qc_free(ref->path);
    qc_free(ref);
}

const qc_reference_origin *qc_reference_origin_of(const qc_reference *ref)
{
    return &ref->origin;
}

void qc_reference_rule(const qc_reference *ref, qc_cut_rule *ret)
{
    *ret = (qc_cut_rule){.protocol = ref->h.protocol,
                         .length = ref->h.length,
                         .stride = ref->h.protocol == QC_PROTOCOL_FULL ? ref->h.stride : 0,
                         .n_windows = ref->h.n_windows,
                         .plain_special = ref->h.plain_special,
                         .bos = ref->h.bos,
                         .bos_id = (int32_t)ref->h.bos_id};
}

const char *qc_reference_path(const qc_reference *ref)
{
    return ref->path;
}

int qc_reference_fits(const qc_reference *ref, const qc_windows *w, int64_t vocab,
                      const char *tokenizer_sha256, qc_err *err)
{
    const header *h = &ref->h;
    if (vocab != h->vocab)
        return qc_fail(
            err, QC_E_INPUT,
            "%s: of a model with %lld vocabulary entries (%s), this one has %lld: not the same kind "
            "of model",
            ref->path, (long long)h->vocab, ref->origin.model, (long long)vocab);
    if (w->n_windows == h->n_windows && strcmp(w->ids_sha256, h->ids_sha256) == 0 &&
        qc_windows_scored(w, w->n_windows) == h->positions)
        return QC_OK;
    bool other_tokenizer = *tokenizer_sha256 && strcmp(tokenizer_sha256, ref->origin.tokenizer_sha256) != 0;
    return qc_fail(err, QC_E_INPUT,
                   "%s: of other token ids (SHA-256 %.16s..., %lld windows of %s) than this run's (%.16s..., "
                   "%lld windows): another text%s",
                   ref->path, h->ids_sha256, (long long)h->n_windows, ref->origin.text, w->ids_sha256,
                   (long long)w->n_windows, other_tokenizer ? " or tokenizer" : "");
}

static int get_window(const qc_reference *ref, int64_t window, int64_t first, int64_t n, qc_kept *ret,
                      qc_err *err)
{
    const header *h = &ref->h;
    const uint8_t *block = ref->map.data + ref->blocks[window];
    uint64_t n_packed = qc_get_le(block, 4), n_raw = qc_get_le(block + 4, 4);
    if (n_raw > qc_kept_most_bytes(h->keep, h->drawn, n))
        return damaged(ref, "a window is too long", err);
    uint8_t *raw = qc_alloc(n_raw + 1, 1);
    if (!raw)
        return qc_fail_nomem(err, "reference", n_raw);
    uLong got = (uLong)n_raw;
    bool good = uncompress(raw, &got, block + BLOCK_BYTES, (uLong)n_packed) == Z_OK && got == n_raw &&
                qc_kept_unpack(raw, got, h->vocab, ret, first, n);
    qc_free(raw);
    return good ? QC_OK : damaged(ref, "a window does not hold what the header says", err);
}

int qc_reference_get(const qc_reference *ref, const qc_windows *windows, int64_t window0, int64_t n_windows,
                     qc_kept *ret, qc_err *err)
{
    int64_t n = qc_windows_scored(windows, window0 + n_windows) - qc_windows_scored(windows, window0), at = 0;
    int rc = qc_kept_alloc(n, ref->h.keep, ref->h.drawn, ret, err);
    for (int64_t i = window0; i < window0 + n_windows && rc == QC_OK; i++) {
        rc = get_window(ref, i, at, window_scored(windows, i), ret, err);
        at += window_scored(windows, i);
    }
    return rc;
}
