#include "inspect.h"

#include "main.h"
#include "open.h"
#include "qc_alloc.h"
#include "qc_blocks.h"
#include "qc_file.h"
#include "qc_json.h"
#include "qc_sha256.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define JSON_VERSION 1

/* ---- texts ---- */

/* "BF16", or "INT4 g128 sym F16" of a tensor on a grid; grids that only GGUF has go by their type there. */
static void type_text(const qc_tensor_info *info, char *ret, size_t ret_bytes)
{
    const qc_grid *g = &info->grid;
    if (info->dtype != QC_DT_GRID)
        snprintf(ret, ret_bytes, "%s", qc_dtype_name(info->dtype));
    else if (g->kind != QC_GRID_AFFINE)
        snprintf(ret, ret_bytes, "%s", qc_block_by_grid(g)->name);
    else if (g->group_elems >= qc_tensor_cols(info))
        snprintf(ret, ret_bytes, "INT%d channel %s %s", g->bits, g->symmetric ? "sym" : "asym",
                 qc_dtype_name(g->scale_dtype));
    else
        snprintf(ret, ret_bytes, "INT%d g%" PRId64 " %s %s", g->bits, g->group_elems,
                 g->symmetric ? "sym" : "asym", qc_dtype_name(g->scale_dtype));
}

/* Names come from files: what would disturb a terminal is shown as "?". */
static void print_name(const char *name, int width)
{
    int n = 0;
    for (; name[n]; n++)
        putchar((unsigned char)name[n] < 0x20 || name[n] == 0x7f ? '?' : name[n]);
    printf("%*s", n < width ? width - n : 0, "");
}

/* ---- list ---- */

static void print_table(const qc_source *src)
{
    int widths[4] = {4, 4, 5, 5};
    char type[64], shape[128], bytes[32];
    int64_t n_elems = 0;
    uint64_t n_bytes = 0;
    for (int64_t i = 0; i < src->n_tensors; i++) {
        const qc_tensor_info *info = src->info(src, i);
        type_text(info, type, sizeof type);
        qc_shape_text(info->shape, info->n_dims, shape, sizeof shape);
        int lengths[4] = {(int)strlen(info->name), (int)strlen(type), (int)strlen(shape),
                          snprintf(bytes, sizeof bytes, "%" PRIu64, info->n_bytes)};
        for (int k = 0; k < 4; k++)
            if (lengths[k] > widths[k])
                widths[k] = lengths[k];
        n_elems += qc_tensor_n_elems(info);
        n_bytes += info->n_bytes;
    }
    printf("%-*s  %-*s  %-*s  %*s\n", widths[0], "name", widths[1], "type", widths[2], "shape", widths[3],
           "bytes");
    for (int64_t i = 0; i < src->n_tensors; i++) {
        const qc_tensor_info *info = src->info(src, i);
        type_text(info, type, sizeof type);
        qc_shape_text(info->shape, info->n_dims, shape, sizeof shape);
        print_name(info->name, widths[0]);
        printf("  %-*s  %-*s  %*" PRIu64 "\n", widths[1], type, widths[2], shape, widths[3], info->n_bytes);
    }
    printf(
        "\n%" PRId64 " tensors, %" PRId64 " elements, %" PRIu64 " bytes (%.3g bits per element), format %s\n",
        src->n_tensors, n_elems, n_bytes, n_elems ? 8 * (double)n_bytes / (double)n_elems : 0, src->format);
}

static void add_tensor(cJSON *list, const qc_tensor_info *info)
{
    const qc_grid *g = &info->grid;
    cJSON *item = qc_json_add_item(list, cJSON_CreateObject());
    cJSON_AddStringToObject(item, "name", info->name);
    cJSON_AddStringToObject(item, "dtype", qc_dtype_name(info->dtype));
    cJSON *shape = cJSON_AddArrayToObject(item, "shape");
    for (int i = 0; i < info->n_dims; i++)
        qc_json_add_item(shape, cJSON_CreateNumber((double)info->shape[i]));
    cJSON_AddNumberToObject(item, "bytes", (double)info->n_bytes);
    if (info->dtype != QC_DT_GRID)
        return;
    cJSON *grid = cJSON_AddObjectToObject(item, "grid");
    if (g->kind != QC_GRID_AFFINE)
        cJSON_AddStringToObject(grid, "type", qc_block_by_grid(g)->name);
    cJSON_AddNumberToObject(grid, "bits", g->bits);
    cJSON_AddBoolToObject(grid, "symmetric", g->symmetric);
    cJSON_AddNumberToObject(grid, "group", (double)g->group_elems);
    cJSON_AddStringToObject(grid, "scale", qc_dtype_name(g->scale_dtype));
}

static cJSON *source_json(const qc_source *src)
{
    int64_t n_elems = 0;
    uint64_t n_bytes = 0;
    qc_json_watch();
    cJSON *doc = cJSON_CreateObject();
    cJSON_AddNumberToObject(doc, "version", JSON_VERSION);
    cJSON_AddStringToObject(doc, "path", src->path);
    cJSON_AddStringToObject(doc, "format", src->format);
    cJSON *list = cJSON_AddArrayToObject(doc, "tensors");
    for (int64_t i = 0; i < src->n_tensors; i++) {
        const qc_tensor_info *info = src->info(src, i);
        add_tensor(list, info);
        n_elems += qc_tensor_n_elems(info);
        n_bytes += info->n_bytes;
    }
    cJSON *totals = cJSON_AddObjectToObject(doc, "totals");
    cJSON_AddNumberToObject(totals, "tensors", (double)src->n_tensors);
    cJSON_AddNumberToObject(totals, "elements", (double)n_elems);
    cJSON_AddNumberToObject(totals, "bytes", (double)n_bytes);
    return qc_json_watched(doc);
}

int qc_inspect_list(const char *path, bool json, qc_err *err)
{
    qc_source *src;
    int rc = QC_OK;
    QC_TRY(qc_source_open(path, &src, err));
    if (json)
        rc = qc_print_json(source_json(src), err);
    else
        print_table(src);
    qc_source_close(src);
    return rc;
}

/* ---- check ---- */

static bool has_float_values(const qc_tensor_info *info)
{
    qc_dtype d = info->dtype;
    return d == QC_DT_F32 || d == QC_DT_F16 || d == QC_DT_BF16 || d == QC_DT_F64 || d == QC_DT_GRID;
}

/* Look at every value of a tensor. *block[*block_elems] grows as needed. */
static int check_values(const qc_source *src, int64_t tensor, float **block, int64_t *block_elems,
                        qc_err *err)
{
    const qc_tensor_info *info = src->info(src, tensor);
    int64_t rows = qc_tensor_rows(info), cols = qc_tensor_cols(info);
    if (rows == 0 || cols == 0 || !has_float_values(info))
        return QC_OK;
    int64_t step = 262144 / cols > 0 ? 262144 / cols : 1;
    step = step > rows ? rows : step;
    if (step * cols > *block_elems) {
        qc_free(*block);
        *block_elems = step * cols;
        if (!(*block = qc_alloc((size_t)*block_elems, sizeof **block)))
            return qc_fail_nomem(err, info->name, (uint64_t)*block_elems * sizeof **block);
    }
    for (int64_t row = 0; row < rows; row += step) {
        int64_t n = rows - row < step ? rows - row : step;
        QC_TRY(qc_check_interrupt(err));
        QC_TRY(src->read_rows(src, tensor, row, n, *block, err));
        int64_t bad = qc_first_nonfinite(*block, n * cols);
        if (bad >= 0)
            return qc_fail(err, QC_E_INPUT, "%s: tensor '%s' holds %s at row %" PRId64 ", column %" PRId64,
                           src->path, info->name, isnan((*block)[bad]) ? "NaN" : "infinity", row + bad / cols,
                           bad % cols);
        src->release(src, tensor, row, n);
    }
    return QC_OK;
}

static int check_source(const qc_source *src, uint64_t *ret_bytes, qc_err *err)
{
    float *block = NULL;
    int64_t block_elems = 0;
    uint64_t n_bytes = 0;
    int rc = qc_source_check(src, err);
    for (int64_t i = 0; rc == QC_OK && i < src->n_tensors; i++) {
        rc = check_values(src, i, &block, &block_elems, err);
        n_bytes += src->info(src, i)->n_bytes;
    }
    qc_free(block);
    *ret_bytes = n_bytes;
    return rc;
}

static cJSON *check_json(const qc_source *src, uint64_t n_bytes)
{
    qc_json_watch();
    cJSON *doc = cJSON_CreateObject();
    cJSON_AddNumberToObject(doc, "version", JSON_VERSION);
    cJSON_AddStringToObject(doc, "path", src->path);
    cJSON_AddStringToObject(doc, "format", src->format);
    cJSON_AddBoolToObject(doc, "ok", true);
    cJSON_AddNumberToObject(doc, "tensors", (double)src->n_tensors);
    cJSON_AddNumberToObject(doc, "bytes", (double)n_bytes);
    return qc_json_watched(doc);
}

int qc_inspect_check(const char *path, bool json, qc_err *err)
{
    qc_source *src;
    uint64_t n_bytes;
    QC_TRY(qc_source_open(path, &src, err));
    int rc = check_source(src, &n_bytes, err);
    if (rc == QC_OK && json)
        rc = qc_print_json(check_json(src, n_bytes), err);
    else if (rc == QC_OK)
        printf("%s: ok, %" PRId64 " tensors, %" PRIu64 " bytes\n", path, src->n_tensors, n_bytes);
    qc_source_close(src);
    return rc;
}

/* ---- hash ---- */

static int hash_file(const char *path, cJSON *list, qc_err *err)
{
    char hex[QC_SHA256_HEX_BYTES];
    QC_TRY(qc_sha256_file(path, hex, err));
    if (!list) {
        printf("%s  %s\n", hex, path);
        return QC_OK;
    }
    cJSON *item = qc_json_add_item(list, cJSON_CreateObject());
    cJSON_AddStringToObject(item, "path", path);
    cJSON_AddStringToObject(item, "sha256", hex);
    return QC_OK;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static void free_names(char **names, size_t n_names)
{
    for (size_t i = 0; i < n_names; i++)
        qc_free(names[i]);
    qc_free(names);
}

/* Paths of the regular files of a folder, sorted; folders inside are not entered. Owned. */
static int list_files(const char *folder, char ***ret, size_t *ret_n, qc_err *err)
{
    DIR *dir = opendir(folder);
    char **names = NULL, *path;
    size_t n = 0, cap = 0;
    struct dirent *entry;
    int rc = dir ? QC_OK : qc_fail(err, QC_E_INPUT, "%s: can not be read: %s", folder, strerror(errno));
    while (rc == QC_OK && (entry = readdir(dir))) {
        struct stat st;
        if (n == cap) {
            char **more = qc_realloc(names, cap * sizeof *names, (2 * cap + 16) * sizeof *names);
            if (!more)
                rc = qc_fail_nomem(err, folder, cap);
            names = more ? more : names;
            cap = more ? 2 * cap + 16 : cap;
        }
        if (rc == QC_OK && !(path = qc_path_join(folder, entry->d_name)))
            rc = qc_fail_nomem(err, folder, strlen(folder));
        if (rc == QC_OK && stat(path, &st) == 0 && S_ISREG(st.st_mode))
            names[n++] = path;
        else if (rc == QC_OK)
            qc_free(path);
    }
    if (dir)
        closedir(dir);
    if (rc < 0) {
        free_names(names, n);
        return rc;
    }
    if (n > 1)
        qsort(names, n, sizeof *names, by_name);
    *ret = names;
    *ret_n = n;
    return QC_OK;
}

static int hash_folder(const char *folder, cJSON *list, qc_err *err)
{
    char **names;
    size_t n;
    int rc = QC_OK;
    QC_TRY(list_files(folder, &names, &n, err));
    for (size_t i = 0; i < n && rc == QC_OK; i++)
        rc = hash_file(names[i], list, err);
    free_names(names, n);
    return rc;
}

int qc_inspect_hash(const char *path, bool json, qc_err *err)
{
    cJSON *doc = NULL, *list = NULL;
    if (json) {
        qc_json_watch();
        doc = cJSON_CreateObject();
        cJSON_AddNumberToObject(doc, "version", JSON_VERSION);
        if (!(list = cJSON_AddArrayToObject(doc, "files"))) {
            cJSON_Delete(doc);
            return qc_fail_nomem(err, "json", 0);
        }
    }
    int rc = qc_path_is_dir(path) ? hash_folder(path, list, err) : hash_file(path, list, err);
    if (rc == QC_OK && json)
        return qc_print_json(qc_json_watched(doc), err);
    cJSON_Delete(doc);
    return rc;
}
