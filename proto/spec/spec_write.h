/* Internal to spec_json.c: a spec as JSON. */
#ifndef SHD_SPEC_WRITE_H
#define SHD_SPEC_WRITE_H

struct spec;

/* The canonical form, with a NUL; the caller's to free. NULL: no memory. */
char *spec_write(const struct spec *spec);

/* The same without tiles. */
char *spec_write_untiled(const struct spec *spec);

#endif
