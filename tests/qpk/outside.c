/* A program outside the tree: uses libqpk through its installed header alone. Prints the first value of the
 * tensor named on the command line. */
#include <qpk.h>

#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
    char err[256] = "usage: outside FILE TENSOR";
    qpk_file *file = NULL;
    if (argc != 3 || qpk_open(argv[1], &file, err, sizeof err) < 0 || qpk_check(file, err, sizeof err) < 0) {
        fprintf(stderr, "%s\n", err);
        return 1;
    }
    long long index = qpk_find(file, argv[2]);
    const qpk_tensor *t = qpk_tensor_at(file, index);
    float *row = t ? malloc((size_t)t->cols * sizeof *row) : NULL;
    if (!row || qpk_dequantize_rows(file, index, 0, 1, row, err, sizeof err) < 0)
        return 1;
    printf("%g\n", (double)row[0]);
    free(row);
    qpk_close(file);
    return 0;
}
