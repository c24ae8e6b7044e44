/* plan_file.c: see plan_file.h. */
#include "examples/gpt/plan_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/plan/plan_text.h"
#include "proto/base/status.h"

/* The whole file and a NUL into text[PLAN_TEXT_BYTES_MAX + 2]: one byte more than there may be,
 * which shd_set_plan() refuses. */
static int read_text(FILE *file, const char *path, char *text, struct shd_err *e)
{
    const size_t bytes = fread(text, 1, PLAN_TEXT_BYTES_MAX + 1, file);
    text[bytes] = '\0';
    if (ferror(file) != 0)
        return err_sys(e, SHD_EIO, "read '%s'", path);
    if (strlen(text) != bytes)
        return err_set(e, SHD_EINVAL, "%s has a NUL: it is no JSON", path);
    return SHD_OK;
}

int plan_file_read(const char *path, char **ret_text, struct shd_err *e)
{
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return err_sys(e, SHD_ENOENT, "open '%s'", path);
    char *text = malloc(PLAN_TEXT_BYTES_MAX + 2);
    const int r = text != NULL ? read_text(file, path, text, e)
                               : err_set(e, SHD_ENOMEM, "no memory to read '%s'", path);
    fclose(file);
    if (r == SHD_OK)
        *ret_text = text;
    else
        free(text);
    return r;
}
