/* See model_json.h. */
#include "daemon/model/model_json.h"

#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/model/model.h"
#include "proto/share/spec_segment.h"
#include "proto/spec/spec_json.h"

int model_json_make(struct model_json *json, const struct spec *spec, struct shd_err *e)
{
    char *text;
    int r = spec_dump(spec, &text, e);
    if (r != SHD_OK)
        return r;
    json->text = text;
    json->bytes = strlen(text);
    if (json->bytes <= SPEC_MESSAGE_BYTES_MAX)
        return SHD_OK;
    r = spec_segment_new(text, json->bytes, &json->segment, e);
    if (r != SHD_OK)
        return r;
    json->text = json->segment.base;
    free(text);
    malloc_trim(0); /* parsing and writing it took many times its bytes */
    return SHD_OK;
}

void model_json_free(struct model_json *json)
{
    if (json->segment.fd < 0)
        free(json->text);
    segment_close(&json->segment);
}
