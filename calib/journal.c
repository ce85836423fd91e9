#include "journal.h"

#include "qc_alloc.h"
#include "qc_buf.h"
#include "qc_file.h"
#include "qc_map.h"
#include "qc_math.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

/* docs/formats/journal.md */
#define MAGIC            "\x89QJL\r\n\x1a\n"
#define MAGIC_BYTES      8
#define VERSION          0
#define HEADER_BYTES     32
#define RECORD_BYTES     32
#define CRC_BYTES        4
#define GRID_BYTES       32
#define MAX_KEYS_BYTES   (16u << 20)
#define MAX_NAME_BYTES   4096
#define WRITE_BYTES      (256u << 10)
#define READ_BLOCK_BYTES (1u << 20)

enum { RECORD_LAYER = 1, RECORD_CODES, RECORD_DENSE, RECORD_TEXT, RECORD_END };

/* One thing that a layer holds. */
typedef struct entry {
    char *name; /* owned */
    int type;
    uint64_t offset, n_bytes; /* of the payload */
    /* of codes: */
    qc_grid grid;
    int64_t n_rows, n_cols;
} entry;

struct qc_journal {
    char *path;
    int fd;            /* holds the lock */
    uint64_t offset;   /* end of what was handed to the file */
    uint64_t complete; /* end of the last whole layer (of the keys at first) */
    int64_t n_layers;
    bool in_layer;
    bool failed;    /* a write did: nothing can be added any more */
    entry *entries; /* those of whole layers first, then those of the layer being written */
    int64_t n_entries, cap_entries, n_complete;
    qc_map *names; /* of entries of whole layers */
    uint32_t crc;  /* of the record being written */
    uint8_t *buf;  /* [WRITE_BYTES] not yet handed to the file */
    size_t n_buf;
};

/* ---- bytes ---- */

static void put_le(uint8_t *p, uint64_t value, int n_bytes)
{
    for (int i = 0; i < n_bytes; i++)
        p[i] = (uint8_t)(value >> (8 * i));
}

static uint64_t get_le(const uint8_t *p, int n_bytes)
{
    uint64_t value = 0;
    for (int i = n_bytes - 1; i >= 0; i--)
        value = value << 8 | p[i];
    return value;
}

static int64_t row_code_bytes(const entry *e)
{
    return (e->n_cols * e->grid.bits + 7) / 8;
}

static int64_t row_groups(const entry *e)
{
    return qc_ceil_div(e->n_cols, e->grid.group_elems);
}

/* Bytes of what stands behind the codes of a row: scales and zero points; or scales and minima; or, with
 * super-blocks, pairs of sub-scales and sub-minima, then pairs of d and dmin. */
static int64_t row_param_bytes(const entry *e)
{
    if (e->grid.kind == QC_GRID_SUPER)
        return row_groups(e) * 4 + e->n_cols / e->grid.super_elems * 8;
    return row_groups(e) * (e->grid.kind == QC_GRID_MIN ? 8 : e->grid.symmetric ? 4 : 5);
}

static int64_t row_bytes(const entry *e)
{
    return row_code_bytes(e) + row_param_bytes(e);
}

static uint64_t codes_bytes(const entry *e)
{
    return GRID_BYTES + (uint64_t)(e->n_rows * row_bytes(e));
}

uint64_t qc_journal_codes_bytes(const qc_grid *grid, int64_t n_rows, int64_t n_cols)
{
    entry e = {.grid = *grid, .n_rows = n_rows, .n_cols = n_cols};
    return RECORD_BYTES + codes_bytes(&e) + CRC_BYTES;
}

/* Codes as a stream of bits, lowest first. */
static void pack_codes(const uint8_t *codes, int64_t n, int bits, uint8_t *dst)
{
    uint32_t acc = 0;
    int held = 0;
    for (int64_t i = 0; i < n; i++) {
        acc |= (uint32_t)codes[i] << held;
        for (held += bits; held >= 8; held -= 8, acc >>= 8)
            *dst++ = (uint8_t)acc;
    }
    if (held)
        *dst = (uint8_t)acc;
}

static void unpack_codes(const uint8_t *src, int64_t n, int bits, uint8_t *codes)
{
    uint32_t acc = 0, mask = (1u << bits) - 1;
    int held = 0;
    for (int64_t i = 0; i < n; i++) {
        for (; held < bits; held += 8)
            acc |= (uint32_t)*src++ << held;
        codes[i] = (uint8_t)(acc & mask);
        acc >>= bits;
        held -= bits;
    }
}

/* ---- file ---- */

/* Fewer bytes than wanted only at the end of the file. */
static int read_at(const qc_journal *j, void *data, size_t n_bytes, uint64_t offset, size_t *ret_got,
                   qc_err *err)
{
    *ret_got = 0;
    while (*ret_got < n_bytes) {
        ssize_t n = pread(j->fd, (char *)data + *ret_got, n_bytes - *ret_got, (off_t)(offset + *ret_got));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return qc_fail(err, QC_E_RESOURCE, "%s: read failed: %s", j->path, strerror(errno));
        if (n == 0)
            break;
        *ret_got += (size_t)n;
    }
    return QC_OK;
}

static int read_all(const qc_journal *j, void *data, size_t n_bytes, uint64_t offset, qc_err *err)
{
    size_t got;
    QC_TRY(read_at(j, data, n_bytes, offset, &got, err));
    if (got < n_bytes)
        return qc_fail(err, QC_E_INPUT, "%s: the file shrank while it was used", j->path);
    return QC_OK;
}

static int flush(qc_journal *j, qc_err *err)
{
    for (size_t done = 0; done < j->n_buf;) {
        ssize_t n = pwrite(j->fd, j->buf + done, j->n_buf - done, (off_t)j->offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return qc_fail(err, QC_E_RESOURCE, "%s: write failed: %s", j->path,
                           n < 0 ? strerror(errno) : "no progress");
        done += (size_t)n;
        j->offset += (uint64_t)n;
    }
    j->n_buf = 0;
    return QC_OK;
}

static int put(qc_journal *j, const void *data, size_t n_bytes, qc_err *err)
{
    const uint8_t *p = data;
    j->crc = (uint32_t)crc32_z(j->crc, p, n_bytes);
    while (n_bytes > 0) {
        size_t n = qc_min_i64((int64_t)n_bytes, (int64_t)(WRITE_BYTES - j->n_buf));
        memcpy(j->buf + j->n_buf, p, n);
        j->n_buf += n;
        p += n;
        n_bytes -= n;
        if (j->n_buf == WRITE_BYTES)
            QC_TRY(flush(j, err));
    }
    return QC_OK;
}

static int sync_file(qc_journal *j, qc_err *err)
{
    QC_TRY(flush(j, err));
    if (fsync(j->fd) != 0)
        return qc_fail(err, QC_E_RESOURCE, "%s: fsync failed: %s", j->path, strerror(errno));
    return QC_OK;
}

/* ---- entries ---- */

static void drop_entries(qc_journal *j, int64_t n_left)
{
    while (j->n_entries > n_left)
        qc_free(j->entries[--j->n_entries].name);
}

/* Take the entry, its name too (freed on failure). */
static int add_entry(qc_journal *j, const entry *e, qc_err *err)
{
    if (j->n_entries == j->cap_entries) {
        int64_t cap = j->cap_entries ? 2 * j->cap_entries : 64;
        entry *grown =
            qc_realloc(j->entries, (size_t)j->cap_entries * sizeof *grown, (size_t)cap * sizeof *grown);
        if (!grown) {
            qc_free(e->name);
            return qc_fail_nomem(err, "entries of the journal", (unsigned long long)cap * sizeof *grown);
        }
        j->entries = grown;
        j->cap_entries = cap;
    }
    j->entries[j->n_entries++] = *e;
    return QC_OK;
}

/* The layer that was written or read is whole: what it holds can be found from now on. */
static int complete_layer(qc_journal *j, uint64_t end, qc_err *err)
{
    for (int64_t i = j->n_complete; i < j->n_entries; i++) {
        const char *name = j->entries[i].name;
        int rc = qc_map_add(j->names, name, strlen(name), i);
        if (rc < 0)
            return qc_fail_nomem(err, "names of the journal", strlen(name));
        if (rc == 0)
            return qc_fail(err, QC_E_INPUT, "%s: %s occurs twice", j->path, name);
    }
    j->n_complete = j->n_entries;
    j->complete = end;
    j->n_layers++;
    return QC_OK;
}

/* An entry of a whole layer; type 0 = any. */
static const entry *find(const qc_journal *j, const char *name, int type)
{
    int64_t i = qc_map_get(j->names, name, strlen(name), -1);
    return i < 0 || i >= j->n_complete || (type && j->entries[i].type != type) ? NULL : &j->entries[i];
}

/* Also in the layer being written? */
static bool is_taken(const qc_journal *j, const char *name)
{
    for (int64_t i = j->n_complete; i < j->n_entries; i++)
        if (strcmp(j->entries[i].name, name) == 0)
            return true;
    return find(j, name, 0) != NULL;
}

static int need(const qc_journal *j, const char *name, int type, const entry **ret, qc_err *err)
{
    *ret = find(j, name, type);
    if (!*ret)
        return qc_fail(err, QC_E_INPUT, "%s: holds no %s of %s", j->path,
                       type == RECORD_CODES   ? "codes"
                       : type == RECORD_DENSE ? "values"
                                              : "text",
                       name);
    return QC_OK;
}

/* ---- header and keys ---- */

static int build_keys(const qc_journal_key *keys, int n_keys, qc_buf *buf, qc_err *err)
{
    for (int i = 0; i < n_keys; i++) {
        uint8_t sizes[8];
        size_t n_name = strlen(keys[i].name), n_value = strlen(keys[i].value);
        put_le(sizes, n_name, 4);
        put_le(sizes + 4, n_value, 4);
        QC_TRY(qc_buf_append(buf, sizes, sizeof sizes, err));
        QC_TRY(qc_buf_append(buf, keys[i].name, n_name, err));
        QC_TRY(qc_buf_append(buf, keys[i].value, n_value, err));
    }
    return QC_OK;
}

static void build_header(const qc_buf *keys, uint8_t header[HEADER_BYTES])
{
    memset(header, 0, HEADER_BYTES);
    memcpy(header, MAGIC, MAGIC_BYTES);
    put_le(header + 8, VERSION, 4);
    put_le(header + 16, keys->n_bytes, 8);
    put_le(header + 24, crc32_z(0, (const uint8_t *)keys->data, keys->n_bytes), 4);
    put_le(header + 28, crc32_z(0, header, 28), 4);
}

/* Empty the file and write header and keys. */
static int start_anew(qc_journal *j, const qc_buf *keys, qc_err *err)
{
    uint8_t header[HEADER_BYTES];
    build_header(keys, header);
    if (ftruncate(j->fd, 0) != 0)
        return qc_fail(err, QC_E_RESOURCE, "%s: can not be emptied: %s", j->path, strerror(errno));
    j->offset = 0;
    QC_TRY(put(j, header, sizeof header, err));
    QC_TRY(put(j, keys->data, keys->n_bytes, err));
    QC_TRY(sync_file(j, err));
    qc_folder_sync(j->path);
    j->complete = j->offset;
    return QC_OK;
}

/* A name and its value in the file. */
typedef struct stored_key {
    const char *name, *value;
    size_t n_name, n_value;
} stored_key;

/* Next key at *p; false, and empty, at the end or where it does not fit. */
static bool next_key(const uint8_t **p, const uint8_t *end, stored_key *ret)
{
    *ret = (stored_key){"", "", 0, 0};
    if (end - *p < 8)
        return false;
    uint64_t n_name = get_le(*p, 4), n_value = get_le(*p + 4, 4);
    if (n_name + n_value > (uint64_t)(end - *p - 8))
        return false;
    const char *name = (const char *)*p + 8;
    *ret = (stored_key){name, name + n_name, (size_t)n_name, (size_t)n_value};
    *p += 8 + n_name + n_value;
    return true;
}

static bool same_text(const char *text, const char *stored, size_t n_stored)
{
    return n_stored == strlen(text) && memcmp(stored, text, n_stored) == 0;
}

static int gone(const qc_journal *j, const stored_key *key, qc_err *err)
{
    return qc_fail(err, QC_E_INPUT, "%s: can not be continued: %.*s was %.*s and is not set now", j->path,
                   (int)qc_min_i64((int64_t)key->n_name, 200), key->name,
                   (int)qc_min_i64((int64_t)key->n_value, 200), key->value);
}

/* The first key that differs is told: its value, that it is new, or that it is no more. */
static int compare_keys(const qc_journal *j, const uint8_t *stored, size_t n_stored,
                        const qc_journal_key *keys, int n_keys, qc_err *err)
{
    const uint8_t *p = stored, *end = stored + n_stored;
    stored_key was;
    for (int i = 0; i < n_keys; i++) {
        bool there = next_key(&p, end, &was);
        if (there && same_text(keys[i].name, was.name, was.n_name)) {
            if (same_text(keys[i].value, was.value, was.n_value))
                continue;
            return qc_fail(err, QC_E_INPUT, "%s: can not be continued: %s was %.*s and is %.200s now",
                           j->path, keys[i].name, (int)qc_min_i64((int64_t)was.n_value, 200), was.value,
                           keys[i].value);
        }
        for (int k = i + 1; k < n_keys && there; k++)
            there = !same_text(keys[k].name, was.name, was.n_name);
        if (there)
            return gone(j, &was, err);
        return qc_fail(err, QC_E_INPUT, "%s: can not be continued: %s was not set and is %.200s now", j->path,
                       keys[i].name, keys[i].value);
    }
    return next_key(&p, end, &was) ? gone(j, &was, err) : QC_OK;
}

/* Keys of an existing file against those of this run. *ret_torn: it ends or is damaged before they do. */
static int check_keys(qc_journal *j, const uint8_t header[HEADER_BYTES], const qc_journal_key *keys,
                      int n_keys, bool *ret_torn, qc_err *err)
{
    uint64_t n_bytes = get_le(header + 16, 8);
    *ret_torn = true;
    if (get_le(header + 28, 4) != crc32_z(0, header, 28) || n_bytes > MAX_KEYS_BYTES)
        return QC_OK;
    if (get_le(header + 8, 4) != VERSION)
        return qc_fail(err, QC_E_INPUT, "%s: version %llu, this program reads version %d", j->path,
                       (unsigned long long)get_le(header + 8, 4), VERSION);
    uint8_t *stored = qc_alloc((size_t)n_bytes, 1);
    if (!stored)
        return qc_fail_nomem(err, "keys of the journal", n_bytes);
    size_t got;
    int rc = read_at(j, stored, (size_t)n_bytes, HEADER_BYTES, &got, err);
    if (rc == QC_OK && got == n_bytes && crc32_z(0, stored, got) == get_le(header + 24, 4)) {
        *ret_torn = false;
        j->complete = HEADER_BYTES + n_bytes;
        rc = compare_keys(j, stored, got, keys, n_keys, err);
    }
    qc_free(stored);
    return rc;
}

/* ---- reading what is there ---- */

/* Fields of codes, checked against the size of the record. */
static bool parse_grid(const uint8_t *p, entry *e)
{
    e->grid = (qc_grid){.kind = p[4] ? (qc_grid_kind)p[4] : QC_GRID_AFFINE,
                        .bits = p[0],
                        .symmetric = p[1] != 0,
                        .scale_dtype = (qc_dtype)get_le(p + 2, 2),
                        .group_elems = (int64_t)get_le(p + 8, 8),
                        .super_elems = (int64_t)get_le(p + 6, 2),
                        .sub_bits = p[5]};
    bool super = e->grid.kind == QC_GRID_SUPER;
    if (p[4] > QC_GRID_SUPER || super != (e->grid.super_elems > 0))
        return false;
    e->n_cols = (int64_t)get_le(p + 16, 8);
    e->n_rows = (int64_t)get_le(p + 24, 8);
    int64_t n_bytes = (int64_t)e->n_bytes;
    if (e->grid.bits < 2 || e->grid.bits > 8 || e->grid.group_elems < 1 || e->grid.group_elems > INT32_MAX ||
        e->n_cols < 1 || e->n_rows < 1 || e->n_cols > n_bytes * 8 || e->n_rows > n_bytes)
        return false;
    int64_t stride = row_bytes(e);
    return e->n_rows <= n_bytes / stride && e->n_rows * stride + GRID_BYTES == n_bytes;
}

/* CRC of a record from its start to the end of its payload. */
static int record_crc(const qc_journal *j, uint64_t offset, uint64_t n_bytes, uint8_t *buf, uint32_t *ret,
                      qc_err *err)
{
    *ret = 0;
    while (n_bytes > 0) {
        size_t n = n_bytes < WRITE_BYTES ? (size_t)n_bytes : WRITE_BYTES;
        QC_TRY(read_all(j, buf, n, offset, err));
        *ret = (uint32_t)crc32_z(*ret, buf, n);
        offset += n;
        n_bytes -= n;
    }
    return QC_OK;
}

/* Read the record at *offset. *ret_type = 0: there is no whole record. Entries are added; *ret_value is the
 * number of a layer. */
static int scan_record(qc_journal *j, uint64_t *offset, uint64_t file_bytes, int *ret_type,
                       int64_t *ret_value, qc_err *err)
{
    uint8_t head[RECORD_BYTES], grid[GRID_BYTES], stored_crc[CRC_BYTES];
    uint64_t room = file_bytes - *offset;
    *ret_type = 0;
    if (room < RECORD_BYTES + CRC_BYTES)
        return QC_OK;
    QC_TRY(read_all(j, head, sizeof head, *offset, err));
    uint64_t n_name = get_le(head + 4, 4), n_payload = get_le(head + 8, 8);
    room -= RECORD_BYTES + CRC_BYTES;
    if (n_name > MAX_NAME_BYTES || n_name > room || n_payload > room - n_name)
        return QC_OK;
    uint64_t n_record = RECORD_BYTES + n_name + n_payload;
    uint32_t crc;
    QC_TRY(record_crc(j, *offset, n_record, j->buf, &crc, err));
    QC_TRY(read_all(j, stored_crc, sizeof stored_crc, *offset + n_record, err));
    if (get_le(stored_crc, 4) != crc)
        return QC_OK;
    entry e = {.type = (int)get_le(head, 4), .offset = *offset + RECORD_BYTES + n_name, .n_bytes = n_payload};
    if (e.type == RECORD_CODES) {
        if (n_payload < GRID_BYTES)
            return QC_OK;
        QC_TRY(read_all(j, grid, sizeof grid, e.offset, err));
        if (!parse_grid(grid, &e))
            return QC_OK;
    }
    if (e.type == RECORD_CODES || e.type == RECORD_DENSE || e.type == RECORD_TEXT) {
        if (!(e.name = qc_calloc((size_t)n_name + 1, 1)))
            return qc_fail_nomem(err, "name in the journal", n_name);
        int rc = read_all(j, e.name, (size_t)n_name, *offset + RECORD_BYTES, err);
        if (rc < 0) {
            qc_free(e.name);
            return rc;
        }
        QC_TRY(add_entry(j, &e, err));
    }
    *ret_type = e.type;
    *ret_value = (int64_t)get_le(head + 16, 8);
    *offset += n_record + CRC_BYTES;
    return QC_OK;
}

/* Whole layers from j->complete on; what follows the last one is cut off. */
static int scan_layers(qc_journal *j, qc_err *err)
{
    struct stat st;
    if (fstat(j->fd, &st) != 0)
        return qc_fail(err, QC_E_RESOURCE, "%s: %s", j->path, strerror(errno));
    uint64_t offset = j->complete;
    bool in_layer = false;
    for (int type; offset < (uint64_t)st.st_size;) {
        int64_t layer = -1;
        QC_TRY(qc_check_interrupt(err));
        QC_TRY(scan_record(j, &offset, (uint64_t)st.st_size, &type, &layer, err));
        bool marker = type == RECORD_LAYER || type == RECORD_END;
        if (type < RECORD_LAYER || type > RECORD_END || in_layer == (type == RECORD_LAYER) ||
            (marker && layer != j->n_layers))
            break;
        in_layer = type != RECORD_END;
        if (type == RECORD_END)
            QC_TRY(complete_layer(j, offset, err));
    }
    drop_entries(j, j->n_complete);
    j->offset = j->complete;
    if (j->complete < (uint64_t)st.st_size && ftruncate(j->fd, (off_t)j->complete) != 0)
        return qc_fail(err, QC_E_RESOURCE, "%s: can not be cut: %s", j->path, strerror(errno));
    return QC_OK;
}

/* ---- opening ---- */

/* Open or create, and lock. The one that removes a journal holds its lock, so a file that is no longer under
 * its name once we hold the lock is another's that has ended: try again. */
static int open_locked(qc_journal *j, bool must_be_new, qc_err *err)
{
    for (int attempt = 0; attempt < 16; attempt++) {
        struct stat by_name, by_fd;
        j->fd =
            open(j->path, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | (must_be_new ? O_EXCL : 0),
                 0666);
        if (j->fd < 0 && errno == EEXIST)
            return qc_fail(err, QC_E_USAGE,
                           "%s: is left from a run that did not end (--resume continues it, --force starts "
                           "anew)",
                           j->path);
        if (j->fd < 0)
            return qc_fail(err, QC_E_RESOURCE, "%s: can not open: %s", j->path, strerror(errno));
        if (fstat(j->fd, &by_fd) != 0 || !S_ISREG(by_fd.st_mode))
            return qc_fail(err, QC_E_USAGE, "%s: is not a regular file; the journal would go there", j->path);
        if (flock(j->fd, LOCK_EX | LOCK_NB) != 0 && errno != ENOLCK && errno != EOPNOTSUPP)
            return qc_fail(err, QC_E_RESOURCE, "%s: another process writes this output", j->path);
        if (stat(j->path, &by_name) == 0 && by_name.st_ino == by_fd.st_ino && by_name.st_dev == by_fd.st_dev)
            return QC_OK;
        close(j->fd);
        j->fd = -1;
    }
    return qc_fail(err, QC_E_RESOURCE, "%s: another process writes this output", j->path);
}

static int open_file(qc_journal *j, const qc_journal_key *keys, int n_keys, bool resume, bool force,
                     qc_err *err)
{
    uint8_t header[HEADER_BYTES] = {0};
    size_t got;
    bool anew = true;
    QC_TRY(open_locked(j, !resume && !force, err));
    QC_TRY(read_at(j, header, sizeof header, 0, &got, err));
    if (memcmp(header, MAGIC, got < MAGIC_BYTES ? got : MAGIC_BYTES) != 0)
        return qc_fail(err, QC_E_USAGE, "%s: is not a journal of qconvert, but the journal would go there",
                       j->path);
    if (resume)
        QC_TRY(check_keys(j, header, keys, n_keys, &anew, err));
    if (!anew)
        return scan_layers(j, err);
    qc_buf buf = {.max_bytes = MAX_KEYS_BYTES};
    int rc = build_keys(keys, n_keys, &buf, err);
    if (rc == QC_OK)
        rc = start_anew(j, &buf, err);
    qc_buf_clear(&buf);
    return rc;
}

int qc_journal_open(const char *path, const qc_journal_key *keys, int n_keys, bool resume, bool force,
                    qc_journal **ret, qc_err *err)
{
    qc_journal *j = qc_calloc(1, sizeof *j);
    if (!j)
        return qc_fail_nomem(err, "journal", sizeof *j);
    j->fd = -1;
    j->path = qc_strdup(path);
    j->buf = qc_alloc(WRITE_BYTES, 1);
    j->names = qc_map_new(256);
    int rc = j->path && j->buf && j->names ? open_file(j, keys, n_keys, resume, force, err)
                                           : qc_fail_nomem(err, "journal", WRITE_BYTES);
    if (rc < 0) {
        qc_journal_close(j);
        return rc;
    }
    *ret = j;
    return QC_OK;
}

void qc_journal_close(qc_journal *journal)
{
    if (!journal)
        return;
    drop_entries(journal, 0);
    qc_free(journal->entries);
    qc_map_free(journal->names);
    qc_free(journal->buf);
    if (journal->fd >= 0)
        close(journal->fd);
    qc_free(journal->path);
    qc_free(journal);
}

void qc_journal_remove(qc_journal *journal)
{
    if (journal)
        unlink(journal->path);
    qc_journal_close(journal);
}

int64_t qc_journal_n_layers(const qc_journal *journal)
{
    return journal->n_layers;
}

/* ---- writing a layer ---- */

/* After a failure nothing more is written, and the file ends with the last whole layer. */
static int checked(qc_journal *j, int rc)
{
    if (rc < 0 && !j->failed) {
        j->failed = true;
        (void)!ftruncate(j->fd,
                         (off_t)j->complete); /* what stays behind is cut off when it is opened again */
    }
    return rc;
}

static int put_head(qc_journal *j, int type, const char *name, uint64_t n_payload, qc_err *err)
{
    uint8_t head[RECORD_BYTES] = {0};
    put_le(head, (uint64_t)type, 4);
    put_le(head + 4, strlen(name), 4);
    put_le(head + 8, n_payload, 8);
    put_le(head + 16, (uint64_t)j->n_layers, 8);
    j->crc = 0;
    QC_TRY(put(j, head, sizeof head, err));
    return put(j, name, strlen(name), err);
}

static int put_crc(qc_journal *j, qc_err *err)
{
    uint8_t crc[CRC_BYTES];
    put_le(crc, j->crc, 4);
    return put(j, crc, sizeof crc, err);
}

/* Head of a record with a payload; an entry for it is added. */
static int begin_record(qc_journal *j, const entry *like, const char *name, qc_err *err)
{
    if (!j->in_layer || j->failed)
        return qc_fail(err, QC_E_INPUT, "%s: %s outside a layer", j->path, name);
    if (!*name || strlen(name) > MAX_NAME_BYTES)
        return qc_fail(err, QC_E_INPUT, "%s: a name of %zu bytes, 1 to %d were expected", j->path,
                       strlen(name), MAX_NAME_BYTES);
    if (is_taken(j, name))
        return qc_fail(err, QC_E_INPUT, "%s: %s occurs twice", j->path, name);
    QC_TRY(put_head(j, like->type, name, like->n_bytes, err));
    entry e = *like;
    e.offset = j->offset + j->n_buf;
    if (!(e.name = qc_strdup(name)))
        return qc_fail_nomem(err, name, strlen(name));
    return add_entry(j, &e, err);
}

static int put_record(qc_journal *j, int type, const char *name, const void *payload, size_t n_bytes,
                      qc_err *err)
{
    entry e = {.type = type, .n_bytes = n_bytes};
    QC_TRY(begin_record(j, &e, name, err));
    QC_TRY(put(j, payload, n_bytes, err));
    return put_crc(j, err);
}

static int put_marker(qc_journal *j, int type, qc_err *err)
{
    QC_TRY(put_head(j, type, "", 0, err));
    return put_crc(j, err);
}

int qc_journal_begin_layer(qc_journal *journal, int64_t layer, qc_err *err)
{
    if (journal->in_layer || journal->failed || layer != journal->n_layers)
        return qc_fail(err, QC_E_INPUT, "%s: layer %lld, %lld was expected", journal->path, (long long)layer,
                       (long long)journal->n_layers);
    journal->in_layer = true;
    return checked(journal, put_marker(journal, RECORD_LAYER, err));
}

static void put_floats(const float *x, int64_t n, uint8_t *dst)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        put_le(dst + 4 * i, bits, 4);
    }
}

static void get_floats(const uint8_t *src, int64_t n, float *x)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)get_le(src + 4 * i, 4);
        memcpy(&x[i], &bits, sizeof bits);
    }
}

static void put_supers(const entry *e, const qc_code_rows *rows, int64_t r, uint8_t *dst)
{
    int64_t n_groups = row_groups(e), n_supers = e->n_cols / e->grid.super_elems;
    for (int64_t i = 0; i < 2 * n_groups; i++)
        put_le(dst + 2 * i, (uint16_t)rows->subs[r * 2 * n_groups + i], 2);
    put_floats(rows->supers + r * 2 * n_supers, 2 * n_supers, dst + 4 * n_groups);
}

static void get_supers(const entry *e, const uint8_t *src, int64_t r, qc_code_rows *rows)
{
    int64_t n_groups = row_groups(e), n_supers = e->n_cols / e->grid.super_elems;
    qc_code_rows row = qc_code_rows_from(rows, &e->grid, e->n_cols, r);
    for (int64_t i = 0; i < 2 * n_groups; i++)
        row.subs[i] = (int16_t)get_le(src + 2 * i, 2);
    get_floats(src + 4 * n_groups, 2 * n_supers, row.supers);
    row.n_rows = 1;
    qc_code_rows_multiply(&row, &e->grid, e->n_cols);
}

static int put_code_rows(qc_journal *j, const entry *e, const qc_code_rows *rows, uint8_t *row, qc_err *err)
{
    int64_t n_codes = row_code_bytes(e), n_groups = row_groups(e);
    for (int64_t r = 0; r < e->n_rows; r++) {
        uint8_t *params = row + n_codes;
        pack_codes(rows->codes + r * e->n_cols, e->n_cols, e->grid.bits, row);
        if (e->grid.kind == QC_GRID_SUPER) {
            put_supers(e, rows, r, params);
        } else {
            put_floats(rows->scales + r * n_groups, n_groups, params);
            if (e->grid.kind == QC_GRID_MIN)
                put_floats(rows->mins + r * n_groups, n_groups, params + 4 * n_groups);
            else if (!e->grid.symmetric)
                memcpy(params + 4 * n_groups, rows->zeros + r * n_groups, (size_t)n_groups);
        }
        QC_TRY(put(j, row, (size_t)row_bytes(e), err));
    }
    return QC_OK;
}

int qc_journal_put_codes(qc_journal *journal, const char *name, const qc_grid *grid, int64_t n_cols,
                         const qc_code_rows *rows, qc_err *err)
{
    entry e = {.type = RECORD_CODES, .grid = *grid, .n_rows = rows->n_rows, .n_cols = n_cols};
    e.n_bytes = codes_bytes(&e);
    uint8_t head[GRID_BYTES] = {(uint8_t)grid->bits, grid->symmetric};
    put_le(head + 2, (uint64_t)grid->scale_dtype, 2);
    head[4] = grid->kind == QC_GRID_AFFINE ? 0 : (uint8_t)grid->kind;
    head[5] = (uint8_t)grid->sub_bits;
    put_le(head + 6, (uint64_t)grid->super_elems, 2);
    put_le(head + 8, (uint64_t)grid->group_elems, 8);
    put_le(head + 16, (uint64_t)n_cols, 8);
    put_le(head + 24, (uint64_t)rows->n_rows, 8);
    uint8_t *row = qc_alloc((size_t)row_bytes(&e), 1);
    if (!row)
        return checked(journal, qc_fail_nomem(err, name, (unsigned long long)row_bytes(&e)));
    int rc = begin_record(journal, &e, name, err);
    if (rc == QC_OK && (rc = put(journal, head, sizeof head, err)) == QC_OK &&
        (rc = put_code_rows(journal, &e, rows, row, err)) == QC_OK)
        rc = put_crc(journal, err);
    qc_free(row);
    return checked(journal, rc);
}

int qc_journal_put_dense(qc_journal *journal, const char *name, const float *values, int64_t n_elems,
                         qc_err *err)
{
    return checked(journal,
                   put_record(journal, RECORD_DENSE, name, values, (size_t)n_elems * sizeof *values, err));
}

int qc_journal_put_text(qc_journal *journal, const char *name, const char *text, qc_err *err)
{
    return checked(journal, put_record(journal, RECORD_TEXT, name, text, strlen(text), err));
}

/* One fsync is enough in whatever order the disk writes: a layer counts when all its checksums are right. */
int qc_journal_end_layer(qc_journal *journal, qc_err *err)
{
    if (!journal->in_layer || journal->failed)
        return qc_fail(err, QC_E_INPUT, "%s: no layer is being written", journal->path);
    int rc = put_marker(journal, RECORD_END, err);
    if (rc == QC_OK)
        rc = sync_file(journal, err);
    if (rc == QC_OK)
        rc = complete_layer(journal, journal->offset, err);
    journal->in_layer = false;
    return checked(journal, rc);
}

/* ---- reading back ---- */

bool qc_journal_has(const qc_journal *journal, const char *name)
{
    return find(journal, name, 0) != NULL;
}

static void decode_row(const entry *e, const uint8_t *src, int64_t r, qc_code_rows *rows)
{
    int64_t n_codes = row_code_bytes(e), n_groups = row_groups(e);
    unpack_codes(src, e->n_cols, e->grid.bits, rows->codes + r * e->n_cols);
    src += n_codes;
    if (e->grid.kind == QC_GRID_SUPER) {
        get_supers(e, src, r, rows);
        return;
    }
    get_floats(src, n_groups, rows->scales + r * n_groups);
    if (e->grid.kind == QC_GRID_MIN)
        get_floats(src + 4 * n_groups, n_groups, rows->mins + r * n_groups);
    else if (!e->grid.symmetric)
        memcpy(rows->zeros + r * n_groups, src + 4 * n_groups, (size_t)n_groups);
}

static bool same_grid(const qc_grid *a, const qc_grid *b)
{
    return a->kind == b->kind && a->bits == b->bits && a->symmetric == b->symmetric &&
           a->group_elems == b->group_elems && a->scale_dtype == b->scale_dtype &&
           a->super_elems == b->super_elems && a->sub_bits == b->sub_bits;
}

int qc_journal_read_codes(const qc_journal *journal, const char *name, const qc_grid *grid, int64_t n_cols,
                          int64_t row0, int64_t n_rows, qc_code_rows *rows, qc_err *err)
{
    const entry *e;
    QC_TRY(need(journal, name, RECORD_CODES, &e, err));
    if (!same_grid(grid, &e->grid))
        return qc_fail(err, QC_E_INPUT, "%s: %s lies on another grid than planned", journal->path, name);
    if (n_cols != e->n_cols || row0 < 0 || n_rows < 0 || row0 > e->n_rows || n_rows > e->n_rows - row0)
        return qc_fail(err, QC_E_INPUT,
                       "%s: %s is [%lld, %lld], rows %lld to %lld of %lld columns are wanted", journal->path,
                       name, (long long)e->n_rows, (long long)e->n_cols, (long long)row0,
                       (long long)(row0 + n_rows), (long long)n_cols);
    int64_t stride = row_bytes(e), step = qc_max_i64(1, READ_BLOCK_BYTES / stride);
    uint8_t *buf = qc_alloc((size_t)qc_min_i64(step, qc_max_i64(n_rows, 1)), (size_t)stride);
    if (!buf)
        return qc_fail_nomem(err, name, (unsigned long long)(step * stride));
    int rc = QC_OK;
    for (int64_t r = 0; r < n_rows && rc == QC_OK; r += step) {
        int64_t n = qc_min_i64(step, n_rows - r);
        rc = read_all(journal, buf, (size_t)(n * stride),
                      e->offset + GRID_BYTES + (uint64_t)((row0 + r) * stride), err);
        for (int64_t i = 0; i < n && rc == QC_OK; i++)
            decode_row(e, buf + i * stride, r + i, rows);
    }
    qc_free(buf);
    if (rc < 0)
        return rc;
    rows->n_rows = n_rows;
    return QC_OK;
}

int qc_journal_read_dense(const qc_journal *journal, const char *name, float *values, int64_t n_elems,
                          qc_err *err)
{
    const entry *e;
    QC_TRY(need(journal, name, RECORD_DENSE, &e, err));
    if (e->n_bytes != (uint64_t)n_elems * sizeof *values)
        return qc_fail(err, QC_E_INPUT, "%s: %s has %llu values, %lld are wanted", journal->path, name,
                       (unsigned long long)(e->n_bytes / sizeof *values), (long long)n_elems);
    return read_all(journal, values, (size_t)e->n_bytes, e->offset, err);
}

int qc_journal_read_text(const qc_journal *journal, const char *name, char **ret, qc_err *err)
{
    const entry *e;
    QC_TRY(need(journal, name, RECORD_TEXT, &e, err));
    char *text = qc_alloc((size_t)e->n_bytes + 1, 1);
    if (!text)
        return qc_fail_nomem(err, name, e->n_bytes);
    int rc = read_all(journal, text, (size_t)e->n_bytes, e->offset, err);
    if (rc < 0) {
        qc_free(text);
        return rc;
    }
    text[e->n_bytes] = 0;
    *ret = text;
    return QC_OK;
}
