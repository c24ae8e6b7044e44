/* See file.h. */
#include "client/ctl/base/file.h"

#include <stdio.h>
#include <stdlib.h>

int file_read(const char *path, size_t bytes_max, char **ret_text, size_t *ret_bytes,
              struct shd_err *e)
{
    FILE *f = fopen(path, "rb");
    if (f == NULL)
        return err_sys(e, SHD_ENOENT, "open '%s'", path);
    char *text = malloc(bytes_max + 2);
    if (text == NULL) {
        fclose(f);
        return err_set(e, SHD_ENOMEM, "no memory to read '%s'", path);
    }
    const size_t bytes = fread(text, 1, bytes_max + 1, f);
    int r = SHD_OK;
    if (ferror(f))
        r = err_sys(e, SHD_EIO, "read '%s'", path);
    else if (bytes > bytes_max)
        r = err_set(e, SHD_ERANGE, "'%s' has more than %zu bytes", path, bytes_max);
    fclose(f);
    if (r != SHD_OK) {
        free(text);
        return r;
    }
    text[bytes] = '\0';
    *ret_text = text;
    *ret_bytes = bytes;
    return SHD_OK;
}
