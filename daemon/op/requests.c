/* See requests.h. */
#include "daemon/op/requests.h"

#define REQUEST_ROW(NAME, name) [WIRE_##NAME] = &request_##name,
const struct request *const requests[WIRE_REQUEST_TYPES] = { WIRE_REQUEST_MAP(REQUEST_ROW) };
