#include "view.h"

#include <stdexcept>
#include <string>

namespace metal_prefill::metal {

BufferTraits traits_of(BufferName name) {
  switch (name) {
    case BufferName::kIds:
      return {"ids", true};
    case BufferName::kTypes:
      return {"types", true};
    case BufferName::kRows:
      return {"rows", true};
    case BufferName::kTiles:
      return {"tiles", true};
    case BufferName::kPages:
      return {"pages", true};
    case BufferName::kStateRows:
      return {"state_rows", true};
    case BufferName::kLayerRows:
      return {"layer_rows", true};
    case BufferName::kX:
      return {"x", false};
    case BufferName::kEmbedded:
      return {"embedded", false};
    case BufferName::kNormed:
      return {"normed", false};
    case BufferName::kProjected:
      return {"projected", false};
    case BufferName::kPartial:
      return {"partial", false};
    case BufferName::kRelative:
      return {"relative", false};
    case BufferName::kAtt:
      return {"att", false};
    case BufferName::kBlock:
      return {"block", false};
    case BufferName::kGateUp:
      return {"gate_up", false};
    case BufferName::kFfn:
      return {"ffn", false};
    case BufferName::kRoutes:
      return {"routes", false};
    case BufferName::kRouteRows:
      return {"route_rows", false};
    case BufferName::kRouteTiles:
      return {"route_tiles", false};
    case BufferName::kExpertFfn:
      return {"expert_ffn", false};
    case BufferName::kExpertOut:
      return {"expert_out", false};
    case BufferName::kConv:
      return {"conv", false};
    case BufferName::kConvolved:
      return {"convolved", false};
    case BufferName::kScanned:
      return {"scanned", false};
    case BufferName::kScanOut:
      return {"scan_out", false};
    case BufferName::kInputs:
      return {"inputs", false};
    case BufferName::kLogits:
      return {"logits", false};
    case BufferName::kHostLogits:
      return {"host_logits", true};
    case BufferName::kCandidates:
      return {"candidates", false};
    case BufferName::kResult:
      return {"result", true};
    case BufferName::kTargets:
      return {"targets", true};
    case BufferName::kLogProbs:
      return {"log_probs", true};
    case BufferName::kHidden:
      return {"hidden", true};
    case BufferName::kWeights:
      return {"weights", true};
    case BufferName::kQkvBias:
      return {"qkv_bias", true};
    case BufferName::kFfnBias:
      return {"ffn_bias", true};
    case BufferName::kPositionBias:
      return {"position_bias", true};
    case BufferName::kExpertsBias:
      return {"experts_bias", true};
    case BufferName::kHeadNorm:
      return {"head_norm", true};
    case BufferName::kKeys:
      return {"keys", false};
    case BufferName::kValues:
      return {"values", false};
    case BufferName::kStates:
      return {"states", false};
    case BufferName::kRopeTable:
      return {"rope_table", false};
  }
  throw std::logic_error("there is no buffer " + std::to_string(int(name)));
}

}  // namespace metal_prefill::metal
