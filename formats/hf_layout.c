#include "hf_layout.h"

#include "qc_alloc.h"
#include "qc_file.h"
#include "qc_json.h"
#include "qc_log.h"
#include "qc_map.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SINGLE_FILE     "model.safetensors"
#define MAX_INDEX_BYTES 100000000u

int qc_hf_names_add(qc_hf_names *names, const char *name, qc_err *err)
{
    if (names->n == names->cap) {
        size_t cap = names->cap ? 2 * names->cap : 16;
        char **v = qc_realloc(names->v, names->cap * sizeof *v, cap * sizeof *v);
        if (!v)
            return qc_fail_nomem(err, "file names", cap * sizeof *v);
        names->v = v;
        names->cap = cap;
    }
    if (!(names->v[names->n] = qc_strdup(name)))
        return qc_fail_nomem(err, "file names", strlen(name) + 1);
    names->n++;
    return QC_OK;
}

void qc_hf_names_clear(qc_hf_names *names)
{
    for (size_t i = 0; i < names->n; i++)
        qc_free(names->v[i]);
    qc_free(names->v);
    *names = (qc_hf_names){0};
}

void qc_hf_names_text(const qc_hf_names *names, char *text, size_t n_bytes)
{
    const size_t tail_bytes = 32; /* " and N more" */
    size_t used = 0;
    text[0] = 0;
    for (size_t i = 0; i < names->n; i++) {
        if (i > 0 && used + strlen(names->v[i]) + 2 + tail_bytes > n_bytes) {
            snprintf(text + used, n_bytes - used, " and %zu more", names->n - i);
            return;
        }
        int n = snprintf(text + used, n_bytes - used, "%s%s", i ? ", " : "", names->v[i]);
        used += n > 0 ? (size_t)n : 0;
        if (used >= n_bytes)
            return;
    }
}

static int by_bytes(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static void sort_names(qc_hf_names *names)
{
    if (names->n > 1)
        qsort(names->v, names->n, sizeof *names->v, by_bytes);
}

static bool contains(const qc_hf_names *names, const char *name)
{
    for (size_t i = 0; i < names->n; i++)
        if (strcmp(names->v[i], name) == 0)
            return true;
    return false;
}

static bool ends_with(const char *s, const char *suffix)
{
    size_t n = strlen(s), m = strlen(suffix);
    return n >= m && strcmp(s + n - m, suffix) == 0;
}

/* Kinds of weight files that are not read; used only to say so. */
static bool is_other_weights(const char *name)
{
    static const char *const suffixes[] = {".gguf", ".bin", ".pt",      ".pth",
                                           ".onnx", ".h5",  ".msgpack", ".npz"};
    for (size_t i = 0; i < sizeof suffixes / sizeof suffixes[0]; i++)
        if (ends_with(name, suffixes[i]))
            return true;
    return false;
}

static int list_folder(const char *folder, qc_hf_names *safetensors, qc_hf_names *others, qc_err *err)
{
    DIR *dir = opendir(folder);
    if (!dir)
        return qc_fail(err, QC_E_INPUT, "%s: %s", folder, strerror(errno));
    int rc = QC_OK;
    struct dirent *e;
    while (rc == QC_OK && (e = readdir(dir))) {
        if (ends_with(e->d_name, ".safetensors"))
            rc = qc_hf_names_add(safetensors, e->d_name, err);
        else if (is_other_weights(e->d_name))
            rc = qc_hf_names_add(others, e->d_name, err);
    }
    closedir(dir);
    sort_names(safetensors);
    sort_names(others);
    return rc;
}

/* The distinct files of weight_map, which must be plain names inside the folder. */
static int files_of_index(const char *path, const cJSON *weight_map, qc_hf_names *files, qc_err *err)
{
    if (!cJSON_IsObject(weight_map) || !weight_map->child)
        return qc_fail(err, QC_E_INPUT, "%s: weight_map is missing, empty or no object", path);
    qc_map *seen = qc_map_new(64);
    int rc = seen ? QC_OK : qc_fail_nomem(err, path, sizeof seen);
    for (const cJSON *c = weight_map->child; c && rc == QC_OK; c = c->next) {
        const char *file = cJSON_GetStringValue(c);
        if (!file)
            rc = qc_fail(err, QC_E_INPUT, "%s: weight_map: value of \"%.200s\" is no file name", path,
                         c->string);
        else if (strpbrk(file, "/\\") || !ends_with(file, ".safetensors"))
            rc = qc_fail(err, QC_E_INPUT,
                         "%s: weight_map: \"%.200s\" for \"%.200s\" is no plain name of a .safetensors file",
                         path, file, c->string);
        else if ((rc = qc_map_add(seen, file, strlen(file), 0)) == 1)
            rc = qc_hf_names_add(files, file, err);
        else if (rc < 0)
            rc = qc_fail_nomem(err, path, strlen(file));
    }
    qc_map_free(seen);
    sort_names(files);
    return rc;
}

/* All files must be there before any is opened; the message lists those that are not. */
static int check_present(const char *folder, const qc_hf_names *files, bool by_index, qc_err *err)
{
    qc_hf_names missing = {0};
    int rc = QC_OK;
    for (size_t i = 0; i < files->n && rc == QC_OK; i++) {
        char *path = qc_path_join(folder, files->v[i]);
        if (!path)
            rc = qc_fail_nomem(err, folder, strlen(files->v[i]));
        else if (access(path, F_OK) != 0 && qc_path_exists(path)) {
            char *text = qc_asprintf("%s (dangling link)", files->v[i]);
            rc =
                text ? qc_hf_names_add(&missing, text, err) : qc_fail_nomem(err, folder, strlen(files->v[i]));
            qc_free(text);
        } else if (access(path, F_OK) != 0)
            rc = qc_hf_names_add(&missing, files->v[i], err);
        qc_free(path);
    }
    if (rc == QC_OK && missing.n > 0) {
        char text[600];
        qc_hf_names_text(&missing, text, sizeof text);
        rc = qc_fail(err, QC_E_INPUT, "%s: missing%s: %s", folder,
                     by_index ? " although " QC_HF_INDEX " names them" : "", text);
    }
    qc_hf_names_clear(&missing);
    return rc;
}

static int no_weights(const char *folder, const qc_hf_names *safetensors, const qc_hf_names *others,
                      qc_err *err)
{
    char text[400];
    for (size_t i = 0; i < safetensors->n; i++)
        if (strstr(safetensors->v[i], "-of-"))
            return qc_fail(err, QC_E_INPUT, "%s: " QC_HF_INDEX " is missing, but there are shards (%s)",
                           folder, safetensors->v[i]);
    const qc_hf_names *found = safetensors->n ? safetensors : others;
    qc_hf_names_text(found, text, sizeof text);
    if (safetensors->n)
        return qc_fail(err, QC_E_UNSUPPORTED,
                       "%s: weights under other names are not supported (%s); " SINGLE_FILE " or " QC_HF_INDEX
                       " expected",
                       folder, text);
    if (others->n)
        return qc_fail(err, QC_E_UNSUPPORTED,
                       "%s: only weights of other kinds (%s); safetensors files expected", folder, text);
    return qc_fail(err, QC_E_INPUT, "%s: no checkpoint: neither " SINGLE_FILE " nor " QC_HF_INDEX, folder);
}

static int mention_strays(const char *folder, const qc_hf_names *safetensors, const qc_hf_names *shards,
                          qc_err *err)
{
    qc_hf_names strays = {0};
    int rc = QC_OK;
    for (size_t i = 0; i < safetensors->n && rc == QC_OK; i++)
        if (!contains(shards, safetensors->v[i]))
            rc = qc_hf_names_add(&strays, safetensors->v[i], err);
    if (rc == QC_OK && strays.n > 0) {
        char text[600];
        qc_hf_names_text(&strays, text, sizeof text);
        qc_log(QC_LOG_WARN, "%s: not part of the model, ignored: %s", folder, text);
    }
    qc_hf_names_clear(&strays);
    return rc;
}

static int find_shards(const char *folder, const qc_hf_names *safetensors, const qc_hf_names *others,
                       qc_hf_layout *layout, qc_err *err)
{
    char *index_path = qc_path_join(folder, QC_HF_INDEX);
    if (!index_path)
        return qc_fail_nomem(err, folder, sizeof QC_HF_INDEX);
    int rc = QC_OK;
    bool by_index = qc_path_exists(index_path);
    if (by_index) {
        rc = qc_json_load(index_path, MAX_INDEX_BYTES, true, &layout->index, err);
        if (rc == QC_OK)
            rc = files_of_index(index_path, qc_json_get(layout->index, "weight_map"), &layout->shards, err);
    } else if (contains(safetensors, SINGLE_FILE)) {
        rc = qc_hf_names_add(&layout->shards, SINGLE_FILE, err);
    } else {
        rc = no_weights(folder, safetensors, others, err);
    }
    qc_free(index_path);
    if (rc == QC_OK)
        rc = check_present(folder, &layout->shards, by_index, err);
    if (rc == QC_OK)
        rc = mention_strays(folder, safetensors, &layout->shards, err);
    return rc;
}

int qc_hf_layout_find(const char *folder, qc_hf_layout *ret, qc_err *err)
{
    qc_hf_names safetensors = {0}, others = {0};
    qc_hf_layout layout = {0};
    int rc = list_folder(folder, &safetensors, &others, err);
    if (rc == QC_OK)
        rc = find_shards(folder, &safetensors, &others, &layout, err);
    qc_hf_names_clear(&safetensors);
    qc_hf_names_clear(&others);
    if (rc == QC_OK)
        *ret = layout;
    else
        qc_hf_layout_clear(&layout);
    return rc;
}

void qc_hf_layout_clear(qc_hf_layout *layout)
{
    qc_hf_names_clear(&layout->shards);
    cJSON_Delete(layout->index);
    layout->index = NULL;
}

/* A tokenizer may be large; the other side files are small. */
static size_t side_file_limit(const char *name)
{
    return strncmp(name, "tokenizer.", 10) == 0 ? 256u << 20 : 16u << 20;
}

int qc_hf_side_file(const char *folder, const char *name, char **ret, size_t *ret_bytes, qc_err *err)
{
    assert(!strchr(name, '/'));
    char *text = NULL, *path = qc_path_join(folder, name);
    size_t n_bytes = 0;
    if (!path)
        return qc_fail_nomem(err, name, strlen(folder));
    int rc = qc_path_exists(path) ? qc_file_read(path, side_file_limit(name), &text, &n_bytes, err) : QC_OK;
    qc_free(path);
    if (rc < 0)
        return rc;
    *ret = text;
    *ret_bytes = n_bytes;
    return QC_OK;
}
